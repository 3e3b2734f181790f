"""Virtual time: actions in the order of their times, and of their making where those are equal. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def run(self, until: float) -> None:
        """Everything up to and at `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = until

    def step(self, until: float) -> bool:
        """The next action alone; False, and it is `until`, where there is none by then."""
        if self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            return True
        self.now = until
        return False
