"""The least time of many runs: whoever computes beside us only makes a run longer."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_ROUNDS = 3


def least_s(call: Callable[[], object], seconds: float) -> float:
    """Of as many runs as fit into `seconds`, three at least. The first one, which may find caches and memory cold,
    counts only where it alone takes that long."""
    first_s = _once_s(call)
    if first_s > seconds:
        return first_s
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < MIN_ROUNDS or time.perf_counter() < until:
        taken.append(_once_s(call))
    return min(taken)


def _once_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
