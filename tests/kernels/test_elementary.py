"""The small operations: right values, and bits that do not depend on the number of rows."""

from collections.abc import Iterator

import pytest
import torch

from kernels.activation import silu_mul
from kernels.backend import Backend, TorchBackend
from kernels.elementary import exp_elementwise, tree_sum
from kernels.native_backend import VARIANTS, NativeBackend, load_native
from kernels.norm import rms_norm

_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _backends() -> Iterator[Backend]:
    """torch, then every variant of the extension that this processor has. The variant is one per process, so each is
    chosen only as it is taken from here: do not make a list of them."""
    yield TorchBackend()
    native = load_native()
    if native is not None:
        yield from (NativeBackend(native, 1, name) for name in VARIANTS if native.use(name))


def test_exp() -> None:
    x = torch.linspace(-86.9, 87.9, 100_001)
    wanted = x.double().exp()
    assert ((exp_elementwise(x).double() - wanted).abs() / wanted).max() < 2.0**-22
    assert exp_elementwise(torch.tensor([-float("inf"), -88.0, 0.0])).tolist() == [0.0, 0.0, 1.0]
    assert exp_elementwise(torch.tensor([float("nan")])).isnan().all()


def test_tree_sum() -> None:
    x = torch.randn(5, 37, 3, dtype=torch.float64)
    torch.testing.assert_close(tree_sum(x, 1), x.sum(1))
    torch.testing.assert_close(tree_sum(x, -1), x.sum(-1))
    assert torch.equal(tree_sum(x, 1)[2:3], tree_sum(x[2:3], 1))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [5, 64, 100, 576])
def test_norm(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (3 * torch.randn(67, size, generator=generator)).to(dtype)
    residual = torch.randn(67, size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype).float()
    exact = torch.nn.functional.rms_norm((x + residual).double(), (size,), weight.double(), 1e-5)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for backend in _backends():
        normed, total = backend.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert torch.equal(total, x + residual) and normed.dtype == dtype
        torch.testing.assert_close(normed.double(), exact, atol=tolerance, rtol=tolerance)
        assert torch.equal(backend.rms_norm(total, weight, 1e-5), normed)
        for row in (0, 40, 66):
            assert torch.equal(
                backend.rms_norm(total[row : row + 1].clone(), weight, 1e-5), normed[row : row + 1]
            )
    assert torch.equal(rms_norm(x[3:4], weight, 1e-5), rms_norm(x, weight, 1e-5)[3:4])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [5, 100, 1536])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(33, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for backend in _backends():
        found = backend.silu_mul(x)
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)
        for row in (0, 17, 32):
            assert torch.equal(backend.silu_mul(x[row : row + 1].clone()), found[row : row + 1])
    assert torch.equal(silu_mul(x[7:8]), silu_mul(x)[7:8])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [5, 16, 100, 576, 1536])
def test_fused_variants_give_equal_bits(size: int, dtype: torch.dtype) -> None:
    """amx, avx512 and avx2 have one way to do these, so workers that differ in them may exchange blocks."""
    x = (4 * torch.randn(67, 2 * size)).to(dtype)
    weight, residual = torch.randn(2 * size), torch.randn(67, 2 * size).to(dtype)
    found = [
        (b.rms_norm(x, weight, 1e-5), *b.add_rms_norm(x, residual.clone(), weight, 1e-5), b.silu_mul(x))
        for b in _backends()
        if isinstance(b, NativeBackend) and b.variant != "plain"
    ]
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_the_extension_is_there_where_a_compiler_is() -> None:
    """An optional extension with a mistake in it is left out in silence; then everything is slow and still right."""
    import shutil

    assert load_native() is not None or shutil.which("cc") is None
