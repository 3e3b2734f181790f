"""How much of the workers' time prompts of each class have taken of late. Pure.

What waits for long is overtaken by better classes that come meanwhile, and nobody knows how many those will be: as many
as of late is the best guess. Forgotten with a time constant of MEMORY_S.
"""

from __future__ import annotations

import math

MEMORY_S = 10.0
LEAST_S = 1.0
"""Less is not known of anybody."""
MOST_CLASSES = 64


class Pressure:
    def __init__(self) -> None:
        self._of: dict[int, tuple[float, float]] = {}  # class → seconds taken, when that was so
        self._since: float | None = None

    def took(self, number: int, seconds: float, now: float) -> None:
        """A prompt of that class was given to a worker, which takes it so long."""
        if not seconds:
            return
        if self._since is None:
            self._since = now
        before_s, at = self._of.pop(number, (0.0, now))
        self._of[number] = (before_s * math.exp((at - now) / MEMORY_S) + seconds, now)
        if len(self._of) > MOST_CLASSES:
            del self._of[next(iter(self._of))]  # who came longest ago

    def above(self, number: int, now: float) -> float:
        """Seconds in a second that better classes take, of all workers together."""
        taken_s = sum(
            taken_s * math.exp((at - now) / MEMORY_S)
            for other, (taken_s, at) in self._of.items()
            if other < number
        )
        if not taken_s or self._since is None:
            return 0.0
        return taken_s / (MEMORY_S * -math.expm1(min(-LEAST_S, self._since - now) / MEMORY_S))
