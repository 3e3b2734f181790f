"""Norms, SiLU's gate, rope and the cache's write in Triton, against float64 and the torch reference."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cache import CacheLayout, PagedCache
from kernels.gpu.norms import add_rms_norm, rms_norm
from kernels.gpu.rope_store import rope_store
from kernels.gpu.silu_mul import silu_mul
from kernels.norm import rms_norm as reference_norm
from kernels.rope import rotate
from tests.kernels.gpu.grid import BLOCK_SIZES, DTYPES, HEAD_DIMS, WHOLE, device_step, scattered_tables

SIZES = (1, 3, 64, 100, 576, 1024, 4096) if WHOLE else (3, 64, 576)
ERROR = {torch.float32: 3e-6, torch.float16: 4e-3}
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_equal_float64_and_a_row_has_its_bits_alone(size: int, dtype: torch.dtype) -> None:
    x, residual = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)
    weight = random(size, dtype=torch.float32, seed=2)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    normed = rms_norm(x, weight, EPS)
    assert (normed.double() - wanted).abs().max() < ERROR[dtype] * max(1, float(wanted.abs().max()))
    assert torch.equal(rms_norm(x[2:3], weight, EPS), normed[2:3])

    total = residual.clone()
    both = add_rms_norm(x, total, weight, EPS)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert torch.equal(both, rms_norm(total, weight, EPS))
    alone = residual[2:3].clone()
    assert torch.equal(add_rms_norm(x[2:3], alone, weight, EPS), both[2:3])


def test_a_norm_of_what_is_no_number_is_none_and_stays_in_its_row() -> None:
    x = random(3, 64, dtype=torch.float32)
    x[1, 7] = math.nan
    normed = rms_norm(x, torch.ones(64), EPS)
    assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # numpy's, in the interpreter: 1 / inf is meant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES if not WHOLE else (*SIZES, 1023, 1025, 14336))
def test_silu_mul_equals_float64(size: int, dtype: torch.dtype) -> None:
    x = random(4, 2 * size, dtype=dtype) * 3
    x[0, 0], x[1, 0] = 200.0, -200.0
    gate, up = x.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    out = silu_mul(x)
    assert (out.double() - wanted).abs().max() < ERROR[dtype] * max(1, float(wanted.abs().max()))
    assert torch.equal(silu_mul(x[1:2]), out[1:2])


def tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(400)[:, None] / 10000 ** (torch.arange(dim // 2)[None, :] / (dim // 2))
    return angles.double().cos().float(), angles.double().sin().float()


CASES = [(dim, BLOCK_SIZES[i % 3], DTYPES[i % 2]) for i, dim in enumerate((*HEAD_DIMS, 20))]


@pytest.mark.parametrize(("dim", "block_size", "dtype"), CASES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_store_equal_the_reference_in_place_and_bits(
    dim: int, block_size: int, dtype: torch.dtype, normed: bool
) -> None:
    """Where nothing belongs nothing is written: the pool is NaN there before and after."""
    heads, kv_heads, layer = 3, 2, 1
    starts, counts = [30, 0, 299], [4, 2, 1]
    table = scattered_tables([34, 2, 300], block_size, 24)
    layout = CacheLayout(2, kv_heads, dim, block_size, dtype, token_major=True)
    cache, expected = PagedCache(layout, 24), PagedCache(layout, 24)
    cache.tensor.fill_(math.nan)
    expected.tensor.fill_(math.nan)
    step = device_step(starts, counts, table)
    qkv = random(7, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = tables(dim)
    norms = (random(dim, dtype=torch.float32, seed=3), random(dim, dtype=torch.float32, seed=4))
    q = rope_store(qkv, cos, sin, norms if normed else None, EPS, cache.token_major(), layer, step)

    x = qkv.view(7, -1, dim)
    q_raw, k_raw, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if normed:
        q_raw, k_raw = reference_norm(q_raw, norms[0], EPS), reference_norm(k_raw, norms[1], EPS)
    positions = step.positions.long()
    angle = (cos[positions], sin[positions])
    wanted_q, wanted_k = rotate(q_raw.float(), *angle), rotate(k_raw.float(), *angle)
    blocks = step.tables[step.token_rows.long(), positions // block_size].long()
    expected.store(layer, blocks, positions % block_size, wanted_k, v)
    written = expected.tensor.isfinite()
    assert torch.equal(cache.tensor.isfinite(), written)
    if normed:
        assert torch.allclose(q, wanted_q, atol=ERROR[dtype] * 4)
        difference = cache.tensor[written].double() - expected.tensor[written].double()
        assert difference.abs().max() < ERROR[dtype] * 4
    else:
        assert torch.equal(q, wanted_q)
        assert torch.equal(cache.tensor[written], expected.tensor[written])


def exact(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: the sum of their squares is exact in whatever order it is added up."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (64, 576))
def test_norms_round_where_the_reference_does(size: int, dtype: torch.dtype) -> None:
    """To the bit, the rounding before the weight included: the tolerance against float64 would hide it."""
    x, residual = exact(4, size, dtype=dtype), exact(4, size, dtype=dtype, seed=1)
    weight = random(size, dtype=torch.float32, seed=2)
    assert torch.equal(rms_norm(x, weight, EPS), reference_norm(x, weight, EPS))
    wanted = reference_norm(x + residual, weight, EPS)
    assert torch.equal(add_rms_norm(x, residual, weight, EPS), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 80))
def test_norms_of_queries_and_keys_round_where_the_reference_does(dim: int, dtype: torch.dtype) -> None:
    heads, kv_heads, block_size = 3, 2, 16
    cache = PagedCache(CacheLayout(1, kv_heads, dim, block_size, dtype, token_major=True), 4)
    step = device_step([15], [2], scattered_tables([17], block_size, 4))
    qkv = exact(2, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (random(dim, dtype=torch.float32, seed=3), random(dim, dtype=torch.float32, seed=4))
    cos, sin = tables(dim)
    q = rope_store(qkv, cos, sin, norms, EPS, cache.token_major(), 0, step)
    x, angle = qkv.view(2, -1, dim), (cos[15:17], sin[15:17])
    assert torch.equal(q, rotate(reference_norm(x[:, :heads], norms[0], EPS).float(), *angle))
    keys = reference_norm(x[:, heads : heads + kv_heads], norms[1], EPS)
    wanted = rotate(keys.float(), *angle).to(dtype)
    for token, position in enumerate((15, 16)):
        block = int(step.tables[0, position // block_size])
        assert torch.equal(cache.token_major()[block, 0, 0, :, position % block_size], wanted[token])


def test_a_token_that_pads_a_graphs_batch_writes_nothing() -> None:
    layout = CacheLayout(1, 1, 64, 16, torch.float32, token_major=True)
    cache = PagedCache(layout, 4)
    step = device_step([3], [1], scattered_tables([4], 16, 4))
    step.positions[0] = -1
    cos, sin = tables(64)
    rope_store(random(1, 3 * 64, dtype=torch.float32), cos, sin, None, EPS, cache.token_major(), 0, step)
    assert not cache.tensor.any()


def test_block_numbers_are_multiplied_in_64_bits() -> None:
    """A pool of 3 * 2^31 numbers, of which the system gives memory only where something is written."""
    layout = CacheLayout(1, 1, 64, 16, torch.float16, token_major=True)
    num_blocks = 3 * (1 << 31) // layout.block_elements
    pool = torch.zeros(1).to(torch.float16).new_empty((num_blocks, 1, 2, 1, 16, 64))
    table = scattered_tables([1], 16, 1)
    table[0, 0] = num_blocks - 1
    step = device_step([0], [1], table)
    qkv = random(1, 3 * 64, dtype=torch.float16)
    pool[-1].zero_()
    rope_store(qkv, *tables(64), None, EPS, pool, 0, step)
    assert torch.equal(pool[-1, 0, 1, 0, 0], qkv[0, 128:])
