"""How long hand-overs have taken of late, from a request's first token to its second. Pure."""

from __future__ import annotations

from collections import deque

RECENT = 64
ENOUGH = 8  # gaps that must be known before one is called usual


class RecentGaps:
    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=RECENT)
        self._sorted: list[float] | None = None

    def add(self, gap_s: float) -> None:
        self._gaps_s.append(gap_s)
        self._sorted = None

    def usual_s(self, share: float) -> float | None:
        """That so large a share of recent gaps keeps; None while too few are known."""
        if len(self._gaps_s) < ENOUGH:
            return None
        if self._sorted is None:
            self._sorted = sorted(self._gaps_s)
        return self._sorted[int(share * (len(self._sorted) - 1))]
