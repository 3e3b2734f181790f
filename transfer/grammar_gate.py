"""Holds back the commands of requests whose grammar is still being compiled: a model step never waits for it. Pure.

    Prefill, Decode, Offer with a grammar ─▶ compiled before? handed on ─ else held, and the grammar is wanted
      ─ compiled ─▶ handed on, in order of arrival
      ─ cannot be compiled ─▶ Ended(failed), not to be tried elsewhere: grammars are limited by counts, not by time
      ─ not compiled within `timeout_s` ─▶ Refused: this machine is busy, another one or a later try may do
    Stop, Abort, Cancel of what is held ─▶ forgotten here; the worker, who never saw it, gives its usual answer

What was handed on stays compiled for as long as the worker has it (`grammars_in_use`).

Any message may come twice or late: a command that comes again takes the place of the one that is held, and a new
decode worker (Rebind) that comes meanwhile is written into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.effects import Effect, ToCoordinator, ToSender
from common.messages import (
    Abort,
    Cancel,
    Decode,
    Ended,
    Later,
    Message,
    Offer,
    Prefill,
    Rebind,
    Refused,
    Stop,
)
from common.request import Grammar, Key, WorkerId

MAX_FAULTS = 256
MAX_HELD = 256
TIMEOUT_S = 3.0  # before the coordinator takes a silent command for lost (it asks four times, a second apart)
_FULL_RETRY_S = 0.1

Command = Prefill | Decode | Offer
Taken = tuple[Message, WorkerId]
"""A message and who sent it."""


@dataclass(slots=True)
class _Held:
    command: Command
    sender: WorkerId
    grammar: Grammar
    until: float


class GrammarGate:
    def __init__(
        self, *, timeout_s: float = TIMEOUT_S, max_held: int = MAX_HELD, max_faults: int = MAX_FAULTS
    ) -> None:
        self._timeout_s = timeout_s
        self._max_held = max_held
        self._max_faults = max_faults
        self._held: dict[Key, _Held] = {}
        self._faults: OrderedDict[Grammar, str] = OrderedDict()  # why what came before cannot be compiled
        self._compiling: set[Grammar] = set()  # looked up, never walked through
        self._wanted: list[Grammar] = []

    def __len__(self) -> int:
        """Commands held."""
        return len(self._held)

    def arrived(
        self, message: Message, sender: WorkerId, is_compiled: Callable[[Grammar], bool], now: float
    ) -> tuple[bool, list[Effect]]:
        """Whether the worker is to see it now, and what is to be said. `is_compiled` only looks it up."""
        match message:
            case Prefill() | Decode() | Offer():
                grammar = message.request.sampling.grammar
                if grammar is None or is_compiled(grammar):
                    self._held.pop(message.key, None)
                    return True, []
                return False, self._hold(message, grammar, sender, now)
            case Rebind():
                held = self._held.get(message.key)
                if held is None or not isinstance(held.command, Prefill):
                    return True, []
                held.command = replace(held.command, target=message.target)
                return False, []
            case Cancel():
                held = self._held.get(message.key)
                if held is not None and held.sender == sender:
                    del self._held[message.key]
            case Stop() | Abort():
                self._held.pop(message.key, None)
        return True, []

    def _hold(self, command: Command, grammar: Grammar, sender: WorkerId, now: float) -> list[Effect]:
        if grammar in self._faults:
            self._faults.move_to_end(grammar)
            return _failed(command, sender, self._faults[grammar])
        held = self._held.get(command.key)
        if held is not None and held.sender != sender:
            return [_answer(command, sender, Refused(*command.key, "taken already"))]
        if held is not None:
            held.command = command
            return []
        if max(len(self._held), len(self._compiling)) >= self._max_held:
            return [_answer(command, sender, Later(*command.key, _FULL_RETRY_S))]
        self._held[command.key] = _Held(command, sender, grammar, now + self._timeout_s)
        if grammar not in self._compiling:
            self._compiling.add(grammar)
            self._wanted.append(grammar)
        return []

    def wanted(self) -> list[Grammar]:
        """Grammars whose compile is to be started; each is named once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def compiled(self, grammar: Grammar, fault: str | None) -> tuple[list[Taken], list[Effect]]:
        """It is ready, or cannot be compiled and why. What the worker is to see now, and what is to be said."""
        self._compiling.discard(grammar)
        if fault is not None:
            self._faults[grammar] = fault
            while len(self._faults) > self._max_faults:
                self._faults.popitem(last=False)
        ready = [key for key, held in self._held.items() if held.grammar == grammar]
        released = [self._held.pop(key) for key in ready]
        if fault is None:
            return [(held.command, held.sender) for held in released], []
        return [], [effect for held in released for effect in _failed(held.command, held.sender, fault)]

    def let_all_go(self) -> list[Taken]:
        """The worker is stopping and refuses them itself."""
        held, self._held = list(self._held.values()), {}
        return [(one.command, one.sender) for one in held]

    def expire(self, now: float) -> list[Effect]:
        late = [key for key, held in self._held.items() if now >= held.until]
        effects: list[Effect] = []
        for key in late:
            held = self._held.pop(key)
            reason = f"its grammar was not compiled within {self._timeout_s:g} s"
            effects.append(_answer(held.command, held.sender, Refused(*key, reason)))
        return effects

    def next_deadline(self) -> float | None:
        return min((held.until for held in self._held.values()), default=None)


def _failed(command: Command, sender: WorkerId, fault: str) -> list[Effect]:
    """Neither here nor elsewhere: the coordinator is told, and a prefill worker that offers it too."""
    reason = f"its grammar {fault}"
    ended = Ended(*command.key, outcome="failed", reason=reason, retryable=False)
    effects: list[Effect] = [ToCoordinator(ended)]
    if isinstance(command, Offer):
        effects.append(ToSender(sender, Refused(*command.key, reason)))
    return effects


def _answer(command: Command, sender: WorkerId, message: Message) -> Effect:
    return ToSender(sender, message) if isinstance(command, Offer) else ToCoordinator(message)
