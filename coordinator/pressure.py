"""What better classes that are not here yet will take of the workers' time, guessed by what came of late. Pure.

What waits for long is overtaken by better classes that come meanwhile, and nobody knows how many those will be. Those
that are here already are not guessed, the lookahead holds them: so what is metered is what comes, and not what is given
out of a backlog. In the next seconds as much is guessed to come as in as many last ones: a burst once more at most,
however wide the target, and those that keep coming for as long as they have kept coming. In less than LATELY_S nobody
comes evenly: so short a time is guessed by LATELY_S (of 730 that were let in beside a stream that had just begun, 95 %
were in time with 6 s, 92 with 10 and 90 with 20). An average over the last seconds that was thought to last for ever
took a burst for a stream; one that was thought to be over as soon as it is forgotten, a stream for a burst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

LATELY_S = 6.0
MEMORY_S = 60.0
BUCKET_S = 1.0
MOST_CLASSES = 64
HALVINGS = 24


@dataclass(frozen=True, slots=True)
class Coming:
    """`ages_s`: how long ago some came, rising; `came_s`: the time that all those no longer ago take of all workers
    together."""

    ages_s: Sequence[float] = ()
    came_s: Sequence[float] = ()

    def takes_s(self, seconds: float) -> float:
        """What they are guessed to take of the next seconds."""
        if not self.ages_s or seconds <= 0:
            return 0.0
        window_s = max(seconds, min(LATELY_S, self.ages_s[-1]))
        return self._came_s(window_s) * seconds / window_s

    def done_s(self, first_s: float) -> float:
        """When that is done that would take so long without them."""
        if not self.ages_s:
            return first_s
        window_s = min(LATELY_S, self.ages_s[-1])
        came_s = self._came_s(window_s)
        if came_s < window_s and first_s / (1 - came_s / window_s) <= window_s:
            return first_s / (1 - came_s / window_s)
        done_s = first_s + came_s
        for age_s, came_s in zip(self.ages_s, self.came_s, strict=True):
            if age_s > done_s:
                break
            done_s = max(done_s, first_s + came_s)
        return done_s

    def fits_after_s(self, first_s: float, alone_s: float, within_s: float) -> float:
        """How long it is until what would take `first_s` now without them would be done within so long, if nobody comes
        meanwhile: less is ahead of it then, down to nothing, and what came of late is longer ago."""
        low_s = max(0.0, first_s - within_s)
        high_s = max(low_s, self.done_s(first_s) - within_s, within_s, LATELY_S)
        for _ in range(HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self._after(middle_s).done_s(max(alone_s, first_s - middle_s)) <= within_s:
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s

    def _after(self, seconds: float) -> Coming:
        return Coming([age_s + seconds for age_s in self.ages_s], self.came_s)

    def _came_s(self, ago_s: float) -> float:
        number = bisect_right(self.ages_s, ago_s)
        return self.came_s[number - 1] if number else 0.0


NOBODY = Coming()


@dataclass(slots=True)
class _Class:
    """Those of one class: when, in buckets, and how many seconds of all workers' time they take."""

    buckets: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, seconds: float, now: float) -> None:
        self.forget(now)
        if not self.buckets:
            seconds = 0.0  # the first one says how long the others took to come, and not that others come
        elif now - self.buckets[-1][0] < BUCKET_S and len(self.buckets) > 1:
            at, before_s = self.buckets.pop()
            self.buckets.append((at, before_s + seconds))
            return
        self.buckets.append((now, seconds))

    def forget(self, now: float) -> None:
        while self.buckets and now - self.buckets[0][0] > MEMORY_S:
            self.buckets.popleft()


class Pressure:
    def __init__(self) -> None:
        self._of: dict[int, _Class] = {}
        self._guessed: dict[int, Coming] = {}
        self._guessed_at = 0.0

    def came(self, number: int, seconds: float, now: float) -> None:
        """A prompt of that class came, which takes so much of the time of all workers together."""
        self._guessed.clear()
        of = self._of.pop(number, None) or _Class()
        of.add(seconds, now)
        self._of[number] = of
        if len(self._of) > MOST_CLASSES:
            del self._of[next(iter(self._of))]  # who came longest ago

    def above(self, number: int, now: float) -> Coming:
        """Of better classes."""
        if now != self._guessed_at:
            self._guessed.clear()
            self._guessed_at = now
        if number not in self._guessed:
            self._guessed[number] = self._guess(number, now)
        return self._guessed[number]

    def _guess(self, number: int, now: float) -> Coming:
        came = []
        for other, of in self._of.items():
            if other < number:
                of.forget(now)
                came += [(now - at, seconds) for at, seconds in of.buckets]
        came.sort()
        return Coming([age_s for age_s, _ in came], [*accumulate(seconds for _, seconds in came)])
