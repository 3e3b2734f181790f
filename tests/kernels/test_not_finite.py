"""NaN and infinity in queries and keys come out of attention as NaN: what overflowed must not become a token."""

import math

import pytest
import torch

from kernels.backend import Backend, TorchBackend
from kernels.cache import CacheLayout, PagedCache
from kernels.native_backend import VARIANTS, NativeBackend, load_native
from tests.kernels.steps import make_step

_TOKENS, _BAD = 50, 20


def _backends() -> list[Backend]:
    native = load_native()
    if native is None:
        return [TorchBackend()]
    return [TorchBackend(), *(NativeBackend(native, 2, name) for name in VARIANTS if native.use(name))]


def _attend(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All tokens in one step."""
    if isinstance(backend, NativeBackend):
        assert backend.native.use(backend.variant)  # one per process
    table = [3, 0, 4, 1]
    cache = PagedCache(CacheLayout(1, k.shape[1], k.shape[2], 16, v.dtype), 5)
    places = torch.arange(_TOKENS)
    cache.store(0, torch.tensor(table)[places // 16], places % 16, k, v)
    return backend.attention(q.clone(), make_step([(0, _TOKENS)], [table], 16), cache, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("head_dim", [64, 48])  # amx takes the first
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_score_that_is_no_number_spoils_its_row_alone(
    dtype: torch.dtype, head_dim: int, where: str, value: float
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q = torch.randn(_TOKENS, 4, head_dim, generator=generator)
    k, v = (torch.randn(_TOKENS, 2, head_dim, generator=generator).to(dtype) for _ in range(2))
    bad_q, bad_k = q.clone(), k.clone()
    (bad_q if where == "q" else bad_k)[_BAD, 1, 3] = value
    wanted: torch.Tensor | None = None
    for backend in _backends():
        clean = _attend(backend, q, k, v)
        found = _attend(backend, bad_q, bad_k, v)
        spoilt = ~found.isfinite().view(_TOKENS, 4, head_dim)
        if wanted is None:  # torch's is the rule
            wanted = spoilt
            assert spoilt[_BAD:].any() and not spoilt[:_BAD].any()
            assert where == "k" or spoilt[_BAD, 1].all()
        assert torch.equal(spoilt, wanted), backend.name
        alone = torch.arange(_TOKENS) < _BAD if where == "k" else torch.arange(_TOKENS) != _BAD
        assert torch.equal(found[alone], clean[alone]), backend.name
