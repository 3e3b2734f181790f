"""RMS norm in fp32 over the last dimension, batch-invariant (torch reference)."""

import torch

from kernels.elementary import tree_sum


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`; x `[..., size]`, weight fp32, result in x's dtype.

    The normed value is rounded to x's dtype before the weight is applied, as in the models' own code.
    """
    wide = x.float()
    mean = tree_sum(wide * wide, -1) / x.shape[-1]
    # By way of double: torch's own root of fp32 is off by one bit for a sixth of numbers on CPUs without AVX-512.
    root = (mean + eps).double().sqrt().float()
    normed = wide * (1.0 / root).unsqueeze(-1)
    return (normed.to(x.dtype).float() * weight).to(x.dtype)
