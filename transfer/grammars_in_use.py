"""Keeps the grammars of a worker's requests compiled for as long as it has them: a step never waits for one. Pure.

A request is noted when it is handed to the worker, which says at every heartbeat whom it still has. Nothing rests on
the moment: one that is let go late costs memory, and one that comes again is held again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from common.messages import Decode, Message, Offer, Prefill
from common.request import Grammar, Key


class Holds(Protocol):
    """Counted: what is held twice is to be let go twice."""

    def hold(self, grammar: Grammar) -> None: ...
    def let_go(self, grammar: Grammar) -> None: ...


class GrammarsInUse:
    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._of: dict[Key, Grammar] = {}

    def __len__(self) -> int:
        """Requests noted: those that the worker has, and those that came since it was last asked."""
        return len(self._of)

    def handed_on(self, message: Message) -> None:
        if isinstance(message, Prefill | Decode | Offer):
            grammar = message.request.sampling.grammar
            if grammar is not None and message.key not in self._of:
                self._of[message.key] = grammar
                self._holds.hold(grammar)

    def still_there(self, keys: Iterable[Key]) -> None:
        """All that the worker has: the others are let go."""
        live = set(keys)
        for key in [key for key in self._of if key not in live]:
            self._holds.let_go(self._of.pop(key))
