"""Where prompts that wait one behind the other would go, and when each would have its first token. Pure.

The rule of `placing.py`, played forward. Whoever is first goes as soon as a worker has room for it (`router.py`): a
decode worker computes it itself where its second token is there sooner, by LOCAL_GAIN, than by way of the prefill
worker that would be done first, and that is worth what the batch waits for it (`worth`); else it goes to a prefill
worker with room, or waits until one has. Nobody passes another, as nobody passes one that was promised a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.step_budget import LONGER
from coordinator.router import STEPS_AHEAD
from coordinator.step_costs import Beside, Pace

LOCAL_GAIN = 0.9
STAYS = 1.25
IN_TIME = 0.7
"""Of what is left until its first token is due: who should be sooner by way of a prefill worker is in time there."""
_NEVER = float("inf")


def local_gain(plan: bool | None) -> float:
    """Of the time to its second token by way of a prefill worker, one that is computed beside a batch takes less.
    `plan`: what was forecast of one that was promised a time. It stays with that unless the other way is a good deal
    sooner: each that went the other way made not only its own forecast wrong, but those of all behind it."""
    if plan is None:
        return LOCAL_GAIN
    return LOCAL_GAIN * STAYS if plan else LOCAL_GAIN / STAYS


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of which is asked where it goes. `tokens`: None, the one that the lookahead is for. `left_s`: until its
    first token is due, if one was promised. `plan`: see `local_gain`. `waiting`: so many wait behind it."""

    tokens: int | None
    left_s: float | None = None
    plan: bool | None = None
    waiting: int = 0


def worth(
    asked: Asked, by_pair_s: float, sooner_s: float, pools_take_s: Sequence[float], harm_s: float
) -> bool:
    """Whether that a decode worker computes it is worth what the rows of its batch wait for it, `harm_s` in all: to
    itself, by `sooner_s`, and to each that waits behind it, since no prefill worker computes it, which takes each of
    them one of `pools_take_s`; or because by way of a prefill worker it should come too late for what it was promised.
    What was planned was found worth it then."""
    if asked.plan or (asked.left_s is not None and by_pair_s > IN_TIME * asked.left_s):
        return True
    return harm_s <= sooner_s + asked.waiting * min(pools_take_s) / len(pools_take_s)


@dataclass(slots=True)
class Computer:
    """One that computes prompts, as it would go on. `line`: those that it has been given, seconds until each is
    computed and its tokens. `own_tokens`: of the prompt that is asked about, those that it has not in its cache.
    `local_gap_s`: from first token to second of one that it computes, a decode worker, beside its batch; None: a
    prefill worker, or there are none. `later`: from when to when it is busy with those that it is given from now on."""

    pace: Pace
    line: list[tuple[float, int]]
    own_tokens: int = 1
    local_gap_s: float | None = None
    later: list[tuple[float, float]] = field(default_factory=list)

    def copy(self) -> Computer:
        return replace(self, line=list(self.line), later=list(self.later))

    @property
    def free_s(self) -> float:
        return self.line[-1][0] if self.line else 0.0

    def room_s(self, tokens: int) -> float:
        """When it has room for a prompt of so many."""
        line, step_tokens, most = self.line, self.pace.step_tokens, LONGER * tokens
        if not line:
            return 0.0
        over = min(tokens, step_tokens) - STEPS_AHEAD * step_tokens
        over += sum(other for _, other in line if other <= most)
        at_s = 0.0
        for done_s, other in line:
            if over <= 0:
                break
            if other <= most:
                over -= other
            at_s = done_s
        return at_s

    def done_s(self, tokens: int, at_s: float) -> float:
        """When one that is given to it then would be computed."""
        free_s = self.free_s
        if free_s > at_s:
            return free_s + self.pace.first_s(tokens, behind=True)
        return at_s + self.pace.first_s(tokens, behind=bool(self.line))

    def take(self, tokens: int, at_s: float) -> float:
        """It is given to it then; when it is computed."""
        done_s = self.done_s(tokens, at_s)
        begins_s = max(at_s, self.free_s)
        ends_s = begins_s + self.pace.taken_s(tokens)
        self.line.append((ends_s, tokens))
        self.later.append((begins_s, ends_s))
        return done_s


class Lookahead:
    """`pools`: prefill workers, or decode workers where there are none; `beside`: decode workers that may compute a
    prompt though there are. `gap_s`: from first to second token by way of both."""

    def __init__(
        self, pools: Sequence[Computer], beside: Sequence[Computer], gap_s: float, at_s: float = 0.0
    ) -> None:
        self._pools = pools
        self._beside = beside
        self._gap_s = gap_s
        self._at_s = at_s  # when the last one was given to somebody

    def copy(self) -> Lookahead:
        pools, beside = ([one.copy() for one in of] for of in (self._pools, self._beside))
        return Lookahead(pools, beside, self._gap_s, self._at_s)

    def after(self, seconds: float) -> None:
        """Nobody is given to anybody before."""
        self._at_s = max(self._at_s, seconds)

    def next(self, asked: Asked) -> tuple[float, bool]:
        """When the next one has its first token, and whether a decode worker computes it beside its batch."""
        self._at_s, computer = self._who(asked)
        own = computer.own_tokens if asked.tokens is None else asked.tokens
        return computer.take(own, self._at_s), computer.local_gap_s is not None

    def _who(self, asked: Asked) -> tuple[float, Computer]:
        at_s, tokens = self._at_s, asked.tokens
        if len(self._pools) == 1 and not self._beside:
            return max(at_s, _room_s(self._pools[0], tokens)), self._pools[0]
        rooms_s = [max(at_s, _room_s(one, tokens)) for one in self._pools]
        pool_s = min(rooms_s)
        local = self._local(asked, pool_s) if self._beside else None
        if local is not None:
            return local
        with_room = [one for one, room_s in zip(self._pools, rooms_s, strict=True) if room_s <= pool_s]
        return pool_s, min(with_room, key=lambda one: one.free_s + _alone_s(one, tokens))

    def _local(self, asked: Asked, until_s: float) -> tuple[float, Computer] | None:
        """Who computes it beside its batch, and from when on it has room, before a pool has."""
        tokens = asked.tokens
        found: tuple[float, float, Computer] | None = None
        alones_s = [_alone_s(one, tokens) for one in self._pools]
        pools_take_s = [_taken_s(one, tokens) for one in self._pools]
        by_pool_s = min(one.free_s + alone_s for one, alone_s in zip(self._pools, alones_s, strict=True))
        for one in self._beside:
            at_s = max(self._at_s, _room_s(one, tokens))
            if at_s > until_s or (found is not None and at_s > found[0]):
                continue
            assert one.local_gap_s is not None
            second_s = max(one.free_s, at_s) + _alone_s(one, tokens) + one.local_gap_s
            by_pair_s = max(by_pool_s, at_s + min(alones_s))
            if second_s - at_s >= local_gain(asked.plan) * (by_pair_s - at_s + self._gap_s):
                continue
            sooner_s = by_pair_s + self._gap_s - second_s
            if worth(asked, by_pair_s, sooner_s, pools_take_s, _harm_s(one, tokens)):
                found = min(found or (_NEVER, _NEVER, one), (at_s, second_s, one), key=lambda who: who[:2])
        return None if found is None else (found[0], found[2])


def _room_s(one: Computer, tokens: int | None) -> float:
    return one.room_s(one.own_tokens if tokens is None else tokens)


def _alone_s(one: Computer, tokens: int | None) -> float:
    return one.pace.alone_s(one.own_tokens if tokens is None else tokens)


def _taken_s(one: Computer, tokens: int | None) -> float:
    return one.pace.taken_s(one.own_tokens if tokens is None else tokens)


def _harm_s(one: Computer, tokens: int | None) -> float:
    """What the rows of its batch wait for it, added up."""
    assert isinstance(one.pace, Beside)
    return one.pace.harm_s(one.own_tokens if tokens is None else tokens)
