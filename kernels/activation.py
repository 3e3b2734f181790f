"""SwiGLU's gate: silu(gate) * up in fp32, batch-invariant (torch reference)."""

import torch

from kernels.elementary import exp_elementwise


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[rows, 2 * size]` (gate, then up) to `[rows, size]` in the same dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + exp_elementwise(-gate)) * up).to(gate_up.dtype)
