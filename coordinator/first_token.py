"""How long a stream's first token is held back, so that the gap to its second keeps the tier's ITL target. Pure.

A prefill worker says the first token as soon as it is sampled. The second comes when the last blocks have moved, the
decode worker's step under way has ended, and one more has run: up to two steps and a transfer, where every later gap
is one step. A tier with `itl_ms` promises that gap too, so its streams give away a little of their `ttft_ms`: the first
token waits by as much as recent gaps went over the target, no longer than until the second is there, and never
beyond the TTFT target or the request's own deadline. Without `itl_ms` nothing is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.recent_gaps import RecentGaps
from coordinator.targets import Targets

SHARE = 0.985  # of recent gaps that are to keep the target
CAUTION = 0.9  # of an ITL target is aimed at
LATEST = 0.98  # of a TTFT target is the latest that one is held to
LEAST_S = 0.001


class FirstTokenPacing:
    """One for all streams of a front: hand-overs of all tiers go over the same workers."""

    def __init__(self, tiers: Mapping[str, Targets]) -> None:
        self._tiers = dict(tiers)
        self._gaps = RecentGaps()

    def observed(self, gap_s: float) -> None:
        """From a first token to the second, as they came to the front, whatever was held."""
        self._gaps.add(gap_s)

    def hold_s(self, tier: str, waited_s: float, deadline_s: float | None = None) -> float:
        """For a first token that came `waited_s` after its request, whose own deadline is `deadline_s` after it."""
        targets = self._tiers.get(tier)
        usual_s = self._gaps.usual_s(SHARE)
        if targets is None or targets.itl_s is None or usual_s is None:
            return 0.0
        hold_s = min(usual_s - CAUTION * targets.itl_s, targets.itl_s)
        if targets.ttft_s is not None:
            hold_s = min(hold_s, LATEST * targets.ttft_s - waited_s)
        if deadline_s is not None:
            hold_s = min(hold_s, LATEST * deadline_s - waited_s)
        return hold_s if hold_s >= LEAST_S else 0.0
