"""fp16 of the extension (kernels/native/scalar.h) against numpy's: every number read, and all ways to round one."""

import numpy as np
import pytest
import torch

from kernels.native_backend import load_native
from kernels.native_linear import KINDS, NativeProducts, kinds_of

NATIVE = load_native()
if NATIVE is None:
    pytest.skip("the extension was not built here", allow_module_level=True)

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
# By a power of two into the subnormals, to where all is zero, and beyond the largest; by others to any rounding.
FACTORS = np.array(
    [1, -1, 2, 2**-9, 2**-14, 2**-20, 2**-24, 3, 1.5, 1 / 3, 0.7, 1234, 65504, 17, 0.0999, 5e-6, 9]
)


@pytest.mark.parametrize("kind", kinds_of(NATIVE, torch.float16), ids=lambda kind: KINDS[kind])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_fp16_is_read_and_rounded_as_numpy_does(kind: int, out_dtype: torch.dtype) -> None:
    """A linear layer of one input multiplies in fp32, where a product of two fp16 numbers is exact."""
    assert NATIVE is not None
    factors = FACTORS.astype(np.float16)
    linear = NativeProducts(NATIVE, 1, kind).linear(torch.from_numpy(factors)[:, None], None, out_dtype)
    found = linear(torch.from_numpy(EVERY.copy())[:, None]).numpy()
    with np.errstate(all="ignore"):
        wanted = EVERY.astype(np.float32)[:, None] * factors.astype(np.float32) + np.float32(0)
        wanted = wanted.astype(found.dtype)
    assert found.shape == (1 << 16, len(FACTORS))
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    numbers, bits = ~np.isnan(wanted), np.uint16 if out_dtype == torch.float16 else np.uint32
    assert np.array_equal(found.view(bits)[numbers], wanted.view(bits)[numbers])
