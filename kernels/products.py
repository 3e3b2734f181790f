"""Linear layers behind one seam: C where it was built, on CPUs; torch everywhere else.

Both give a row the same bits whatever other rows share the call, but not the same bits as each other: what was
chosen goes into the fingerprint, and two workers exchange blocks only when it is equal.
"""

from typing import Protocol

import torch

from kernels.linear import ProbedProducts
from kernels.native_backend import load_native
from kernels.native_linear import NativeProducts


class Linear(Protocol):
    """`y = x @ weight.T + bias`, bit-stable per row."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[rows, in]` in the model's dtype to `[rows, out]`."""
        ...


class Products(Protocol):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Linear:
        """Prepares a weight `[out, in]`; it is not kept. Results come in `out_dtype`, the weight's or fp32."""
        ...

    def describe(self) -> dict[str, str]:
        """How products are made here, for the fingerprint."""
        ...


def choose_products(device: torch.device, threads: int, spare_threads: int = 0) -> Products:
    """`spare_threads`: more of them, for kernels that do not wait for those that find no core."""
    native = load_native()
    if device.type == "cpu" and native is not None:
        return NativeProducts(native, threads + spare_threads)
    return ProbedProducts(device, threads)
