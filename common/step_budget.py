"""The prompt tokens that one step may compute, given out in order. Pure. An object lives while one step is formed.

The rule for long prompts: who could not end with what is left of the step gets half of it; the rest is for those behind
it, of its class or a higher one, that have no more left than a LONGER-th of what it has, and so on among them; what
nobody takes is the first one's. So a prompt waits for no much longer one for more than half of each step, or until that
one is late; and a long one goes on with half of each step at least (BR-067). One that is due (as the policy sees it)
and not late leaves nothing to who is due later: deadlines are met in their order or not at all.
"""

from __future__ import annotations

from common.batching import SCORED_COST
from common.sequence import Sequence

LONGER = 4


class StepBudget:
    def __init__(self, tokens: int, now: float) -> None:
        self._left = tokens
        self._now = now
        self._longs: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []

    @property
    def is_spent(self) -> bool:
        """Nobody gets anything any more."""
        return self._left <= 0

    def is_open_to(self, seq: Sequence) -> bool:
        """Whether it may get some of what is left, if it is short enough."""
        return self._left > 0 and (not self._longs or seq.lane[0] <= self._longs[-1].lane[0])

    def narrow(self, tokens: int) -> bool:
        """From here on the step has no more than so many in all; whether there is something left."""
        given = sum(count * _token_cost(seq) for seq, count in self._chunks)
        self._left = max(0, min(self._left, tokens - given))
        return self._left > 0

    def give(self, seq: Sequence) -> None:
        """A share to who is next in order, if there is one for it."""
        if not self.is_open_to(seq) or seq.left == 0:
            return
        if self._longs and LONGER * seq.left > self._longs[-1].left:
            return
        cost = _token_cost(seq)
        if seq.left * cost <= self._left:
            self._take(seq, seq.left)
        else:
            in_time = self._now < seq.place[0] < float("inf")
            self._take(seq, max(1, (self._left if in_time else self._left // 2) // cost))
            self._longs.append(seq)

    def _take(self, seq: Sequence, tokens: int) -> None:
        self._chunks.append((seq, tokens))
        self._left -= tokens * _token_cost(seq)

    def chunks(self) -> list[tuple[Sequence, int]]:
        """Everybody's tokens, in the order in which they were given."""
        if not self._longs or self._left <= 0:
            return self._chunks
        long, rest = self._longs[0], self._left
        more = min(rest // _token_cost(long), long.left)
        return [(seq, tokens + more if seq is long else tokens) for seq, tokens in self._chunks]


def _token_cost(seq: Sequence) -> int:
    return SCORED_COST if seq.owes_scores else 1
