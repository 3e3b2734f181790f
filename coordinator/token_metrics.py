"""What is counted for each token: how many came, and how long after the one before they went out. Pure.

Plain numbers, laid out when somebody scrapes: the library's own objects lock and look up for each sample, which took
a tenth of what a streamed token costs the front.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.worker_metrics import PREFIX, add_histogram


class TierTokens:
    """The tokens of one tier's requests."""

    __slots__ = ("_bounds_s", "accepted", "gap_counts", "gaps_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.accepted = 0
        self.gaps_s = 0.0
        self.gap_counts = [0] * (len(bounds_s) + 1)

    def gap(self, seconds: float) -> None:
        self.gaps_s += seconds
        self.gap_counts[bisect_left(self._bounds_s, seconds)] += 1


class TokenMetrics(Collector):
    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._tiers: dict[str, TierTokens] = {}

    def of(self, tier: str) -> TierTokens:
        found = self._tiers.get(tier)
        if found is None:
            found = self._tiers[tier] = TierTokens(self._bounds_s)
        return found

    def collect(self) -> Iterator[Metric]:
        tokens = Metric(PREFIX + "generation_tokens", "Output tokens accepted by the front.", "counter")
        gaps = Metric(
            PREFIX + "inter_token_latency_seconds", "From one written token to the next.", "histogram"
        )
        bounds = [*map(str, map(float, self._bounds_s)), "+Inf"]
        for tier, told in self._tiers.items():
            tokens.add_sample(tokens.name + "_total", {"tier": tier}, float(told.accepted))
            row = (told.gaps_s, float(sum(told.gap_counts)), *map(float, told.gap_counts))
            add_histogram(gaps, {"tier": tier}, bounds, row)
        yield tokens
        yield gaps
