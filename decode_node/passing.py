"""Transfers that were told "later": how often each was overtaken, and for whom others are to give way. Pure.

They ask again on their own; so they stand in no line here, and a large one could be passed by small ones for ever.
After `MAX_PASSES` of them room is kept for it, as long as it asks.

One of a higher class waits for none of a lower one. As long as it asks, those of lower classes neither come back nor
start; and while it has no room, those that hold some give it up one after the other, transfers under way first (nothing
of them is lost). Bounds: nobody is put out for it who has been a victim MAX_VICTIM times, and while somebody waits to
come back no more than MAX_PASSES of higher classes are let in before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.request import Key
from common.sequence import Sequence

MAX_PASSES = 32
ASKS_FOR_S = 5.0
"""A transfer told "later" that has not asked again for so long does not want room any more."""


@dataclass(slots=True)
class _Asked:
    seq: Sequence
    at: float
    passes: int


class Passing:
    def __init__(self) -> None:
        self._passed_over: dict[Key, _Asked] = {}

    def room_is_kept(self, key: Key, now: float) -> bool:
        """Whether it is, for another one that was overtaken so often."""
        self._forget_old(now)
        return next((k for k, asked in self._passed_over.items() if asked.passes >= MAX_PASSES), key) != key

    def most_wanted(self, now: float) -> Sequence | None:
        """Who asks and is of the highest class, the first of those."""
        self._forget_old(now)
        return min((asked.seq for asked in self._passed_over.values()), key=lambda s: s.lane[0], default=None)

    def told_later(self, seq: Sequence, now: float) -> None:
        asked = self._passed_over.get(seq.key)
        self._passed_over[seq.key] = _Asked(seq, now, 0 if asked is None else asked.passes)

    def accepted(self, key: Key) -> None:
        self.forget(key)
        for asked in self._passed_over.values():
            asked.passes += 1

    def forget(self, key: Key) -> None:
        self._passed_over.pop(key, None)

    def _forget_old(self, now: float) -> None:
        for other in [k for k, asked in self._passed_over.items() if now - asked.at > ASKS_FOR_S]:
            del self._passed_over[other]
