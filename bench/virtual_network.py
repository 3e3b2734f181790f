"""The network of a virtual cluster: a policy that is passed in decides what becomes of each message and frame. Pure.

A policy sees who sends what to whom, and says when it arrives: once, twice, never, damaged, or when it is let go.
`RandomFaults` is one; tests pass their own to meet a single message. Beside that, links between two parties can be
cut, stalled and slowed: a cut one loses what is on it, a stalled one keeps it, as TCP does that outlives the gap. Who
cannot reach a party any more hears of it after a while, as `transfer/presence.py` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from bench.virtual_clock import VirtualClock
from common.messages import Message, Sender

COORDINATOR = "coordinator"
"""The party that is coordinator and front. All others are workers, by their ids."""
REFUSED_AFTER_S = 0.7
GONE_AFTER_S = 3.0
"""Until a peer is taken for gone: where nobody listens any more, and where nobody answers."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message on its way, or one frame: then the message is its header, and `content` what the block holds."""

    source: str
    target: str
    message: Message
    sender: Sender
    content: object = None

    @property
    def kind(self) -> str:
        return type(self.message).__name__


@dataclass(frozen=True, slots=True)
class Fate:
    """A parcel arrives after each of `delays_s`, so never where there are none. `corrupt` damages a block; `held`: it
    lies here until it is let go."""

    delays_s: tuple[float, ...]
    corrupt: bool = False
    held: bool = False


LOST = Fate(())
HELD = Fate((0.0,), held=True)

Policy = Callable[[Parcel], Fate]
Receive = Callable[[Parcel, bool], None]
"""Takes a parcel; the flag is false where its block was damaged."""
Gone = Callable[[str], None]
"""Hears of a party that cannot be reached any more."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances, per message or frame, and the span of its delay."""

    lose: float = 0.0
    double: float = 0.0
    delay_s: tuple[float, float] = (0.0001, 0.0005)
    corrupt: float = 0.0


class RandomFaults:
    """The policy of chances. One of a pair of doubles comes up to twenty times later."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self.faults = faults
        self._random = random

    def __call__(self, parcel: Parcel) -> Fate:
        faults, random = self.faults, self._random
        corrupt = parcel.content is not None and bool(faults.corrupt) and random.random() < faults.corrupt
        if faults.lose and random.random() < faults.lose:
            return LOST
        delay_s = random.uniform(*faults.delay_s)
        if faults.double and random.random() < faults.double:
            return Fate((delay_s, random.uniform(*faults.delay_s) * 20), corrupt)
        return Fate((delay_s,), corrupt)


@dataclass(frozen=True, slots=True)
class _Link:
    state: Literal["cut", "stalled", "slow"]
    extra_s: float = 0.0


class VirtualNetwork:
    def __init__(self, clock: VirtualClock, policy: Policy) -> None:
        self.policy = policy
        self._clock = clock
        self._receive: dict[str, Receive] = {}
        self._gone: dict[str, Gone] = {}
        self._absent: dict[str, float] = {}  # since when
        self._links: dict[frozenset[str], _Link] = {}
        self._held: list[tuple[Parcel, bool]] = []

    def join(self, party: str, receive: Receive, gone: Gone = lambda party: None) -> None:
        """It is there, for the first time or again."""
        self._receive[party] = receive
        self._gone[party] = gone
        self._absent.pop(party, None)

    def left(self, party: str) -> None:
        """Its process has ended."""
        self._absent[party] = now = self._clock.now
        self._clock.at(now + REFUSED_AFTER_S, lambda: self._tell_absence(party, now))

    def _tell_absence(self, party: str, since: float) -> None:
        if self._absent.get(party) == since:
            for other, gone in self._gone.items():
                if other not in self._absent:
                    gone(party)

    def send(self, parcel: Parcel) -> None:
        fate = self.policy(parcel)
        extra_s = 0.0
        if self._links:
            link = self._link(parcel)
            extra_s = link.extra_s if link is not None else 0.0
        if fate.held:
            self._held.append((parcel, not fate.corrupt))
            return
        for delay_s in fate.delays_s:
            self._deliver(parcel, not fate.corrupt, self._clock.now + delay_s + extra_s)

    def let_go(self, which: Callable[[Parcel], bool] | None = None) -> int:
        """What was held, or some of it, arrives now and in order. Returns how many."""
        freed = [entry for entry in self._held if which is None or which(entry[0])]
        self._held = [entry for entry in self._held if entry not in freed]
        for parcel, intact in freed:
            self._deliver(parcel, intact, self._clock.now)
        return len(freed)

    # ------------------------------------------------------------ links

    def cut(self, one: str, other: str) -> None:
        """Nothing passes either way, and what is under way is lost."""
        link = self._links[frozenset((one, other))] = _Link("cut")
        self._clock.at(self._clock.now + GONE_AFTER_S, lambda: self._tell_cut(one, other, link))

    def _tell_cut(self, one: str, other: str, link: _Link) -> None:
        if self._links.get(frozenset((one, other))) is link:
            self._gone[one](other)
            self._gone[other](one)

    def stall(self, one: str, other: str) -> None:
        """Nothing passes either way, until the link is restored: then all of it does."""
        self._links[frozenset((one, other))] = _Link("stalled")

    def slow(self, one: str, other: str, extra_s: float) -> None:
        self._links[frozenset((one, other))] = _Link("slow", extra_s)

    def restore(self, one: str, other: str) -> None:
        parties = frozenset((one, other))
        self._links.pop(parties, None)
        self.let_go(lambda parcel: {parcel.source, parcel.target} == parties)

    def _link(self, parcel: Parcel) -> _Link | None:
        return self._links.get(frozenset((parcel.source, parcel.target)))

    # ------------------------------------------------------------ arrival

    def _deliver(self, parcel: Parcel, intact: bool, time: float) -> None:
        self._clock.at(time, lambda: self._arrive(parcel, intact))

    def _arrive(self, parcel: Parcel, intact: bool) -> None:
        if self._links:
            link = self._link(parcel)
            if link is not None and link.state == "cut":
                return
            if link is not None and link.state == "stalled":
                self._held.append((parcel, intact))
                return
        self._receive[parcel.target](parcel, intact)
