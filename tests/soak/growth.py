"""What grows in a process over time: samples of one life of it, and the slope that they show. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WARM_UP_SHARE = 0.3  # of a life: caches fill, pools are touched
MIN_SAMPLES = 150  # one a second: after two minutes, pools still being touched passed for 135 MB an hour
T_95 = 2.0  # of Student's t, two-sided, from about twenty samples on


@dataclass(frozen=True, slots=True)
class Slope:
    """Per hour, with the half-width of its 95 % confidence interval."""

    per_hour: float
    plus_minus: float

    @property
    def least(self) -> float:
        return self.per_hour - self.plus_minus


@dataclass(slots=True)
class Life:
    """One process from its start to its end: seconds, and what was measured then."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    anonymous_bytes: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        """Enough of it to say anything of a slope."""
        return len(self.at_s) * (1 - WARM_UP_SHARE) >= MIN_SAMPLES

    def slope(self, values: list[float]) -> Slope:
        first = int(len(values) * WARM_UP_SHARE)
        return slope_of(self.at_s[first:], values[first:])


def slope_of(at_s: list[float], values: list[float]) -> Slope:
    """Least squares. At least three points."""
    n = len(at_s)
    mean_t, mean_v = sum(at_s) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in at_s)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(at_s, values, strict=True)) / spread
    rest = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in zip(at_s, values, strict=True))
    error = math.sqrt(rest / max(1, n - 2) / spread)
    return Slope(slope * 3600, T_95 * error * 3600)
