"""Triton's interpreter with products in which a row's bits do not depend on its place, as those of matrix units are.

The interpreter's own go through numpy's BLAS. OpenBLAS without AVX-512 cuts 16 rows into six, six and four, and adds in
another order in each: a chunk's token then has other bits than the same token as a decode row, on such machines alone.
"""

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    product = np.einsum("ik,kj->ij", a.data, b.data, dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot
