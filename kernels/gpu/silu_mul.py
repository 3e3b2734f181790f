"""SwiGLU's gate, silu(gate) * up, in Triton. Elementwise, in fp32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, size, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = i < size
    gate = tl.load(gate_up + token * 2 * size + i, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + i, mask=wanted, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * size + i, result.to(out.dtype.element_ty), mask=wanted)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[tokens, 2 * size]` contiguous (gate, then up) to `[tokens, size]` of its dtype."""
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, size))
    _silu_mul_kernel[(tokens, triton.cdiv(size, TILE))](gate_up, out, size, TILE=TILE, enable_fp_fusion=False)
    return out
