"""Transfers that were told "later": how often each was overtaken by one accepted after it asked. Pure.

They ask again on their own; so they stand in no line here, and a large one could be passed by small ones for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.request import Key

MAX_PASSES = 32
ASKS_FOR_S = 5.0
"""A transfer told "later" that has not asked again for so long does not want room any more."""


@dataclass(slots=True)
class _Asked:
    at: float
    passes: int


class Passing:
    def __init__(self) -> None:
        self._passed_over: dict[Key, _Asked] = {}

    def room_is_kept(self, key: Key, now: float) -> bool:
        """Whether it is, for another one that was overtaken so often."""
        for other in [k for k, asked in self._passed_over.items() if now - asked.at > ASKS_FOR_S]:
            del self._passed_over[other]
        return next((k for k, asked in self._passed_over.items() if asked.passes >= MAX_PASSES), key) != key

    def told_later(self, key: Key, now: float) -> None:
        asked = self._passed_over.get(key)
        self._passed_over[key] = _Asked(now, 0 if asked is None else asked.passes)

    def accepted(self, key: Key) -> None:
        self.forget(key)
        for asked in self._passed_over.values():
            asked.passes += 1

    def forget(self, key: Key) -> None:
        self._passed_over.pop(key, None)
