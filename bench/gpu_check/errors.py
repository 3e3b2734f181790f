"""How far results are from what they should be: every measure is NaN, and so wrong, where one of them has a NaN."""

from __future__ import annotations

import torch


def row_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """`[rows, …]`, wanted in float64: the largest difference of a row over the row's root mean square, of all rows. So
    a row of small values, such as attention to many keys has, is held to as many digits as others."""
    off = (found.double() - wanted).abs().flatten(1).amax(1)
    scale = wanted.flatten(1).square().mean(1).sqrt()
    return float((off / scale).max())


def value_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the wanted value, which counts as no less than a thousandth of the largest."""
    floor = float(wanted.abs().max()) / 1000
    return float(((found.double() - wanted).abs() / wanted.abs().clamp_min(floor)).max())


def unequal(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How many elements are others, NaN being equal to itself."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return float((~same).sum())
