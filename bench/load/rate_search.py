"""The highest rate at which a wanted share of requests attains its targets: doubling, then halving. Pure.

A run whose requests all came long before they were served is one burst, whatever its rate. Where it fails, a longer
one would fail too; where it attains its targets nothing is known of the rate, and the search ends: any higher rate
would be the same burst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEEPEST = 64
"""Below the first rate by so much, a service is taken to be unable at any rate."""
MAX_POINTS = 24
BURST = 2.0
"""A run that takes so many times as long as its requests took to come."""


@dataclass(slots=True)
class RateSearch:
    """`next_rate`, run it, `tell` what share attained; None when the bounds are within `within` of each other."""

    first_rate: float
    wanted: float
    within: float
    shares: dict[float, float] = field(default_factory=dict)
    too_few: float | None = None
    """The rate at which requests were too few to tell, which ended the search."""

    @property
    def passing(self) -> float | None:
        """The highest rate that was good enough with none below it that was not."""
        worst = self.failing
        good = [rate for rate, share in self.shares.items() if share >= self.wanted]
        return max((rate for rate in good if worst is None or rate < worst), default=None)

    @property
    def failing(self) -> float | None:
        """The lowest rate that was not good enough."""
        return min((rate for rate, share in self.shares.items() if share < self.wanted), default=None)

    def next_rate(self) -> float | None:
        low, high = self.passing, self.failing
        if self.too_few is not None or len(self.shares) >= MAX_POINTS:
            return None
        if low is None and high is None:
            return self.first_rate
        if high is None:
            assert low is not None
            return low * 2
        if low is None:
            return high / 2 if high * DEEPEST > self.first_rate else None
        return None if high <= low * (1 + self.within) else math.sqrt(low * high)

    def tell(self, rate: float, share: float, came_in_s: float = 1.0, whole_s: float = 1.0) -> None:
        """`came_in_s` is the time in which requests came, `whole_s` until the last one ended."""
        if share >= self.wanted and whole_s > BURST * came_in_s:
            self.too_few = rate
        else:
            self.shares[rate] = share

    def found(self) -> float | None:
        """Between the two bounds where the line through their shares crosses the wanted one; the passing one where
        nothing failed. None where nothing passed."""
        low, high = self.passing, self.failing
        if low is None or high is None:
            return low
        above, below = self.shares[low], self.shares[high]
        return low + (high - low) * (above - self.wanted) / (above - below)
