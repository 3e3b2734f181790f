"""How long to wait before a process that died is started again. Pure.

Doubling from `first_s` up to `limit_s`: a worker that cannot live does not eat the machine with start-ups. A life
of `healthy_after_s` counts as recovered, and the next wait is short again.
"""

from __future__ import annotations


class Backoff:
    """One per process that is kept alive."""

    def __init__(self, first_s: float = 0.5, limit_s: float = 30.0, healthy_after_s: float = 60.0) -> None:
        assert 0 < first_s <= limit_s
        self._first_s = first_s
        self._limit_s = limit_s
        self._healthy_after_s = healthy_after_s
        self._deaths_in_a_row = 0

    def after_death(self, lived_s: float) -> float:
        """Seconds to wait now that the process died, having lived `lived_s`."""
        if lived_s >= self._healthy_after_s:
            self._deaths_in_a_row = 0
        self._deaths_in_a_row += 1
        doublings = min(self._deaths_in_a_row - 1, 60)  # 2.0**60 is far past any limit, 2.0**1024 an overflow
        return min(self._first_s * 2.0**doublings, self._limit_s)
