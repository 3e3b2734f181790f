"""What the state machines share: how many histories are tried, and messages under way that a history may spoil.

`make test` tries few histories, the same ones each time. `MACHINES=50 make machines` tries 50 times as many, other
ones each time; what fails is printed as a program to paste into a test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

MULTIPLIER = int(os.environ.get("MACHINES", "1"))
MAX_UNDER_WAY = 400

SHRINKING_TAKES = pytest.mark.timeout(900 * MULTIPLIER)
"""For a module's `pytestmark`: a failing history is made short before it is shown."""

T = TypeVar("T")


def histories(count: int, *, steps: int = 50) -> settings:
    """Settings of a machine: so many histories in `make test`, each of up to `steps` steps."""
    return settings(
        max_examples=count * MULTIPLIER,
        stateful_step_count=steps,
        deadline=None,
        derandomize=MULTIPLIER == 1,
        database=None,
        print_blob=MULTIPLIER > 1,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class UnderWay(Generic[T]):
    """Messages that were sent and have not arrived. They may arrive in any order, twice, or never; what stands here
    for too long is lost, so that a history stays small."""

    def __init__(self) -> None:
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        del self._items[:-MAX_UNDER_WAY]

    def take(self, which: int) -> T:
        """One of them arrives; 0 is the oldest."""
        return self._items.pop(which % len(self._items))

    def copy(self, which: int) -> T:
        """One of them arrives and is still under way: it comes again."""
        return self._items[which % len(self._items)]

    def places(self, which: Callable[[T], bool]) -> list[int]:
        """Where such messages stand, for `take` and `copy`."""
        return [place for place, item in enumerate(self._items) if which(item)]

    def lose_all(self, which: Callable[[T], bool]) -> None:
        self._items = [item for item in self._items if not which(item)]

    def lose(self, which: int) -> None:
        del self._items[which % len(self._items)]
