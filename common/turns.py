"""In which order a worker serves what it holds: policy, counters and ageing over its few sequences. Pure.

The counters are of what this worker served since it started; the coordinator keeps its own, of all workers. A lane
counts as waiting while `in_turn` is asked about one of its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from common.ordering import AGEING_S, Lane, Place, Policy, due_at
from common.sequence import Sequence
from common.shares import IN_COST, OUT_COST, Shares

_place = attrgetter("place")
_served_at = attrgetter("served_at")


class Turns:
    def __init__(self, policy: Policy, ageing_s: float = AGEING_S) -> None:
        self._policy = policy
        self._ageing_s = ageing_s
        self._shares = Shares()
        self._waiting: dict[Lane, None] = {}
        self._aged: Sequence | None = None
        self._aged_turn_at = float("-inf")

    def enter(self, seq: Sequence, now: float) -> None:
        """It is new here: gives it its lane and place."""
        seq.lane = self._policy.lane(seq.request)
        seq.place = self._policy.place(due_at(seq.request, now), seq.arrival)
        seq.served_at = now

    def in_turn(self, seqs: Seq[Sequence], now: float) -> list[Sequence]:
        """All of `seqs`, who is next first: as if each were served whole, so that lanes alternate."""
        if not seqs and not self._waiting:
            return []
        lanes: dict[Lane, list[Sequence]] = {}
        for seq in seqs:
            lanes.setdefault(seq.lane, []).append(seq)
        self._note(lanes)
        for line in lanes.values():
            line.sort(key=_place)
        order = self._merged(lanes)
        self._aged = self._aged_of(seqs, now)
        if self._aged is not None:
            order.remove(self._aged)
            order.insert(0, self._aged)
        return order

    def line_up(self, kinds: Iterable[list[Sequence]], seqs: Seq[Sequence], now: float) -> list[Sequence]:
        """As `in_turn`; lists of some of them are put into that order too."""
        order = self.in_turn(seqs, now)
        if len(order) > 1:
            rank = {id(seq): place for place, seq in enumerate(order)}
            for kind in kinds:
                kind.sort(key=lambda seq: rank[id(seq)])
        return order

    def _note(self, lanes: dict[Lane, list[Sequence]]) -> None:
        for lane in [lane for lane in self._waiting if lane not in lanes]:
            del self._waiting[lane]
            self._shares.goes(lane)
        for lane in lanes:
            if lane not in self._waiting:
                others = (self._shares.counter(other) for other in self._waiting if other[0] == lane[0])
                self._shares.comes(lane, min(others, default=None))
                self._waiting[lane] = None

    def _merged(self, lanes: dict[Lane, list[Sequence]]) -> list[Sequence]:
        if len(lanes) == 1:
            (order,) = lanes.values()
            return order
        ahead: list[tuple[int, float, Place, Lane, int]] = [
            (lane[0], self._shares.counter(lane), line[0].place, lane, 0) for lane, line in lanes.items()
        ]
        heapify(ahead)
        order = []
        while ahead:
            number, counter, _, lane, index = ahead[0]
            line = lanes[lane]
            seq = line[index]
            order.append(seq)
            if index + 1 == len(line):
                heappop(ahead)
            else:
                counter += IN_COST * seq.left / seq.request.weight
                heapreplace(ahead, (number, counter, line[index + 1].place, lane, index + 1))
        return order

    def _aged_of(self, seqs: Iterable[Sequence], now: float) -> Sequence | None:
        if now < self._aged_turn_at:
            return None
        oldest = min(seqs, key=_served_at, default=None)
        return oldest if oldest is not None and now - oldest.served_at >= self._ageing_s else None

    def served(self, seq: Sequence) -> float:
        """How much its lane was, by weight: to be compared with lanes of its class, after `count_outputs`."""
        return self._shares.counter(seq.lane)

    def computes(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """So many tokens of it without KV are in the step that goes out now. What has to be computed again, because
        it was put out, is not its tenant's to pay."""
        seq.served_at = now
        if seq is self._aged:
            self._aged, self._aged_turn_at = None, now + self._ageing_s
        if seq.preemptions == 0:
            self._shares.charge(seq.lane, IN_COST * num_tokens / seq.request.weight)

    def count_outputs(self, seqs: Iterable[Sequence]) -> None:
        """Answer tokens since this was last called for them. Counted when somebody asks, or one leaves: for every token
        it would cost what a step may."""
        for seq in seqs:
            new = len(seq.tokens) - seq.prompt_len - seq.charged_outputs
            if new > 0:
                seq.charged_outputs += new
                self._shares.charge(seq.lane, OUT_COST * new / seq.request.weight)
