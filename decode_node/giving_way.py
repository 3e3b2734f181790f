"""Who gives up blocks when they run out, and to one of a higher class that asks for room. Pure.

First the newest transfer that was accepted but not delivered is revoked (the prefill worker still has every block,
nothing is lost), then one that computes is preempted, by the rule of `preemption.py`: its blocks go, its tokens stay.
To one that asks, only those of lower classes give way, and none that has been a victim MAX_VICTIM times.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from common.batching import BatchingCore
from common.lifecycle import Phase
from common.request import Key
from common.sequence import Sequence
from common.turns import Turns
from decode_node.forecast import Forecast
from decode_node.held import Held
from decode_node.preemption import MAX_VICTIM, Preemption


class GivingWay:
    """What it did that others must hear of stands in `revoked` and `put_out`; the caller clears them."""

    def __init__(self, core: BatchingCore, held: Held, turns: Turns, forecast: Forecast) -> None:
        self._core = core
        self._held = held
        self._turns = turns
        self._forecast = forecast
        self._preemption = Preemption(turns.served)
        self.revoked: list[Key] = []  # reservations given up
        self.put_out: list[tuple[Sequence, int]] = []  # preempted, and how many tokens must be computed again
        self.preemptions = 0
        self.lost_tokens = 0

    def to_those_who_run(self, now: float) -> None:
        """One gives up its blocks: at least one of those here holds some."""
        if self._held.reserved:
            self._revoke(next(reversed(self._held.reserved)))
        else:
            self._preempt_one_of(self._held.with_blocks(), now)

    def to(self, wanted: Sequence, may_come: Callable[[], bool], preempting: bool, now: float) -> None:
        """One after the other, until it may come or nobody is left who gives way to it. `preempting`: whether those
        that compute do."""
        while True:
            on_their_way = [key for key, seq in self._held.reserved.items() if wanted.above(seq)]
            running = [
                seq for seq in self._held.with_blocks() if wanted.above(seq) and seq.preemptions < MAX_VICTIM
            ]
            nobody = not on_their_way and (not running or not preempting)
            if nobody or may_come():
                return
            if on_their_way:
                self._revoke(on_their_way[-1])
            else:
                self._preempt_one_of(running, now)

    def _revoke(self, key: Key) -> None:
        self.revoked.append(key)
        seq = self._held.reserved.pop(key)
        del self._held.seqs[key]
        seq.over = True
        self._core.free(seq)
        self._forecast.changed()

    def _preempt_one_of(self, holders: list[Sequence], now: float) -> None:
        self._turns.count_outputs(holders)
        seq = self._preemption.victim(holders)
        self._held.take_out(seq)
        self.preemptions += 1
        lost = self._preemption.put_out(self._core, seq)
        self.lost_tokens += lost
        self._forecast.changed()
        seq.plain_until = 0
        seq.life.move(Phase.PREEMPTED, now)
        self.put_out.append((seq, lost))
        insort(self._held.preempted, seq, key=by_order)


def by_order(seq: Sequence) -> tuple[int, int]:
    return seq.order
