"""Paged attention: against a plain softmax, and bit for bit against itself however the work is cut."""

import math

import pytest
import torch

from kernels.backend import Backend, TorchBackend
from kernels.cache import CacheLayout, PagedCache
from kernels.native_backend import VARIANTS, NativeBackend, load_native
from kernels.rope import RopeTable
from kernels.step import StepLayout
from tests.kernels.steps import make_step

_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _variants(head_dim: int, block_size: int) -> list[Backend]:
    found: list[Backend] = [TorchBackend()]
    native = load_native()
    if native is not None and NativeBackend.fits(head_dim, block_size):
        for name in VARIANTS:
            if native.use(name):
                found.append(NativeBackend(native, 2, name))
    return found


def _use(backend: Backend) -> Backend:
    """The extension's variant is one per process: choose again before each use."""
    if isinstance(backend, NativeBackend):
        native = load_native()
        assert native is not None and native.use(backend.variant)
    return backend


def _case(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, tokens: int
) -> tuple[torch.Tensor, list[int], PagedCache]:
    """Queries of one sequence, its scattered table, and a cache with NaN wherever it holds nothing of it."""
    generator = torch.Generator().manual_seed(heads * 100 + head_dim)
    layout = CacheLayout(2, kv_heads, head_dim, block_size, dtype)
    blocks = -(-tokens // block_size)
    cache = PagedCache(layout, 3 * blocks + 2)
    cache.tensor.fill_(float("nan"))
    table = torch.randperm(3 * blocks + 2, generator=generator)[:blocks].tolist()
    places = torch.arange(tokens)
    k, v = (torch.randn(tokens, kv_heads, head_dim, generator=generator) for _ in range(2))
    cache.store(1, torch.tensor(table)[places // block_size], places % block_size, k, v)
    return torch.randn(tokens, heads, head_dim, generator=generator), table, cache


def _plain_softmax(q: torch.Tensor, table: list[int], cache: PagedCache) -> torch.Tensor:
    tokens, heads, head_dim = q.shape
    blocks, kv_heads = torch.tensor(table), cache.layout.num_kv_heads
    k = cache.keys(1, blocks).permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, :tokens]
    v = cache.values(1, blocks).permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :tokens]
    group = heads // cache.layout.num_kv_heads
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q.double(), k) / math.sqrt(head_dim)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


_SHAPES = [
    (9, 3, 64, 16),
    (4, 4, 16, 16),
    (8, 1, 128, 32),
    (6, 2, 80, 16),
    (16, 1, 32, 16),
    (4, 2, 10, 8),
    (5, 5, 6, 4),
]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), _SHAPES)
def test_values_and_bits(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    tokens = 50
    q, table, cache = _case(heads, kv_heads, head_dim, block_size, dtype, tokens)
    exact = _plain_softmax(q, table, cache).reshape(tokens, -1)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 3e-6}[dtype]
    for backend in _variants(head_dim, block_size):
        _use(backend)
        whole = backend.attention(q, make_step([(0, tokens)], [table], block_size), cache, 1)
        torch.testing.assert_close(whole.double(), exact, atol=tolerance, rtol=tolerance)
        for chunk in (1, 7, 32):
            for start in range(0, tokens, chunk):
                end = min(start + chunk, tokens)
                step = make_step([(start, end - start)], [table], block_size)
                assert torch.equal(backend.attention(q[start:end].clone(), step, cache, 1), whole[start:end])


def test_a_row_is_alone_in_any_batch() -> None:
    """Decode rows of many lengths beside prompt chunks, two threads."""
    q, table, cache = _case(9, 3, 64, 16, torch.bfloat16, 400)
    rows = [(399, 1), (0, 130), (16, 1), (15, 1), (200, 77), (0, 1), (31, 2)]
    queries = torch.cat([q[start : start + count] for start, count in rows])
    step = make_step(rows, [table] * len(rows), 16)
    for backend in _variants(64, 16):
        _use(backend)
        together = backend.attention(queries, step, cache, 1)
        at = 0
        for start, count in rows:
            alone = backend.attention(
                q[start : start + count].clone(), make_step([(start, count)], [table], 16), cache, 1
            )
            assert torch.equal(alone, together[at : at + count]), (backend.name, start, count)
            at += count


def test_fused_variants_give_equal_bits() -> None:
    """avx512 and avx2 share a name in the fingerprint, so they must share their bits."""
    q, table, cache = _case(9, 3, 64, 16, torch.float32, 100)
    step = make_step([(0, 100)], [table], 16)
    fused = [b for b in _variants(64, 16) if b.name == "native-fma"]
    results = [_use(backend).attention(q, step, cache, 1) for backend in fused]
    assert all(torch.equal(result, results[0]) for result in results)


def _rope_case(
    dtype: torch.dtype,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], RopeTable, StepLayout]:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(21, (4 + 2 * 2) * 32, generator=generator).to(dtype)
    norms = (1 + 0.1 * torch.randn(32, generator=generator)).to(dtype).float()
    angles = torch.rand(64, 16, generator=generator) * 6
    step = make_step([(5, 20), (33, 1)], [[2, 0], [1, 3, 4]], 16)
    return qkv, (norms, norms.flip(0).contiguous()), RopeTable(angles.cos(), angles.sin()), step


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_rope_and_store(dtype: torch.dtype, with_norms: bool) -> None:
    qkv, norms, table, step = _rope_case(dtype)
    layout = CacheLayout(2, 2, 32, 16, dtype)
    results = []
    for backend in _variants(32, 16):
        cache = PagedCache(layout, 6)
        _use(backend)
        q = backend.rope_and_store(qkv, norms if with_norms else None, 1e-5, table, step, cache, 1)
        assert q.shape == (21, 4, 32) and q.dtype == torch.float32
        assert not cache.tensor[:, 0].any()
        results.append((q, cache.tensor.float()))
        alone = PagedCache(layout, 6)
        last = make_step([(33, 1)], [[1, 3, 4]], 16)
        q_alone = backend.rope_and_store(
            qkv[20:].clone(), norms if with_norms else None, 1e-5, table, last, alone, 1
        )
        assert torch.equal(q_alone, q[20:])
        block = torch.tensor([4])
        assert torch.equal(alone.keys(1, block)[..., 1], cache.keys(1, block)[..., 1])
    # amx, avx512 and avx2 stand before plain
    assert all(torch.equal(q, results[1][0]) and torch.equal(kv, results[1][1]) for q, kv in results[2:-1])
    for q, stored in results[1:]:
        tolerance = {torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(q, results[0][0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(stored, results[0][1], atol=tolerance, rtol=tolerance)
