"""RMS norm, alone or with the addition of a residual before it, in Triton. A program has one token.

Why batch-invariant: a token's sum is one reduction over a tile as wide as the hidden size, whose shape follows from the
model alone. Where the torch reference rounds (`kernels/norm.py`), this does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, eps, size, DTYPE: tl.constexpr):
    """x fp32, zero past `size`; rounded to DTYPE before the weight is applied, as in the models' own code."""
    mean = tl.sum(x * x, axis=0) / size
    normed = x * (1.0 / tl.sqrt_rn(mean + eps))
    return normed.to(DTYPE).to(tl.float32) * weight


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, size, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, SIZE)
    wanted = i < size
    wide = tl.load(x + at + i, mask=wanted, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=wanted, other=0.0)
    dtype = out.dtype.element_ty
    tl.store(out + at + i, _normed(wide, scale, eps, size, dtype).to(dtype), mask=wanted)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, eps, size, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, SIZE)
    wanted = i < size
    dtype = out.dtype.element_ty
    total = tl.load(x + at + i, mask=wanted, other=0.0).to(tl.float32)
    total += tl.load(residual + at + i, mask=wanted, other=0.0).to(tl.float32)
    rounded = total.to(dtype)
    tl.store(residual + at + i, rounded, mask=wanted)
    scale = tl.load(weight + i, mask=wanted, other=0.0)
    tl.store(out + at + i, _normed(rounded.to(tl.float32), scale, eps, size, dtype).to(dtype), mask=wanted)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[tokens, size]` contiguous, weight `[size]` fp32, to x's shape and dtype."""
    _check(x, weight)
    out = torch.empty_like(x)
    _rms_norm_kernel[(len(x),)](x, weight, out, eps, x.shape[1], **_tile(x.shape[1]))
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x + residual, both `[tokens, size]`; the sum, rounded to their dtype, is in `residual` afterwards."""
    _check(x, weight)
    assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype
    out = torch.empty_like(x)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, out, eps, x.shape[1], **_tile(x.shape[1]))
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.is_contiguous() and weight.shape == x.shape[1:] and weight.dtype == torch.float32


def _tile(size: int) -> dict[str, int | bool]:
    width = triton.next_power_of_2(size)
    return {"SIZE": width, "num_warps": min(16, max(1, width // 256)), "enable_fp_fusion": False}
