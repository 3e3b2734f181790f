"""Sums and exponentials whose bits do not depend on the shape of the call.

Why not `torch.sum` and `torch.exp`: torch picks the order of a sum by the tensor's shape and thread count, and the
last few elements of a vectorised loop go through another exponential than the rest, so a row's result can change
by one bit with the number of rows. Additions, multiplications and comparisons of single elements are rounded the
same everywhere, so what is made of them alone is batch-invariant by construction, on every device.
"""

import torch

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # nine bits, so that n * _LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
# exp(r) on |r| <= ln2 / 2 as 1 + r + r^2 * p(r); minimax coefficients of the Cephes library's expf.
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOWEST, _HIGHEST = -87.0, 88.0


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over one dimension by halving: a fixed tree of additions, padded with zeros to a power of two."""
    size = x.shape[dim]
    width = 1 << max(size - 1, 0).bit_length()
    if width != size:
        missing = list(x.shape)
        missing[dim] = width - size
        x = torch.cat([x, x.new_zeros(missing)], dim)
    while width > 1:
        width //= 2
        x = x.narrow(dim, 0, width) + x.narrow(dim, width, width)
    return x.squeeze(dim)


def exp_elementwise(x: torch.Tensor) -> torch.Tensor:
    """exp of fp32 within 2 ulp. Below -87 it is zero, above 88 it stays at exp(88)."""
    bounded = x.clamp(_LOWEST, _HIGHEST)
    power = torch.round(bounded * _LOG2_E)
    rest = bounded - power * _LN2_HIGH
    rest = rest - power * _LN2_LOW
    series = torch.full_like(rest, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        series = series * rest
        series = series + coefficient
    series = series * (rest * rest)
    series = series + rest
    series = series + 1.0
    scale = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < _LOWEST, 0.0, series * scale)
