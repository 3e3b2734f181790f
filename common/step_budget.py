"""The prompt tokens that one step may compute, given out in order. Pure. An object lives while one step is formed.

The rule for long prompts: whoever comes first that could not end in this step gets half of what is left; those behind
it, of its class or a higher one, that can end with the other half do so, in order; what they leave is the long one's
too. So a short prompt waits for no more of a long one than half of each step until its own turn, one chunk where
nothing else is before it, and a long one goes on with half of each step at least (BR-067).
"""

from __future__ import annotations

from common.batching import SCORED_COST
from common.sequence import Sequence


class StepBudget:
    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._long: Sequence | None = None
        self._chunks: list[tuple[Sequence, int]] = []

    def is_open_to(self, seq: Sequence) -> bool:
        """Whether it may get some of what is left, if it is short enough."""
        return self._left > 0 and (self._long is None or seq.lane[0] <= self._long.lane[0])

    def give(self, seq: Sequence) -> None:
        """A share to who is next in order, if there is one for it."""
        cost = _token_cost(seq)
        if not self.is_open_to(seq) or seq.left == 0:
            return
        if seq.left * cost <= self._left:
            self._take(seq, seq.left)
        elif self._long is None:
            self._take(seq, max(1, self._left // 2 // cost))
            self._long = seq

    def _take(self, seq: Sequence, tokens: int) -> None:
        self._chunks.append((seq, tokens))
        self._left -= tokens * _token_cost(seq)

    def chunks(self) -> list[tuple[Sequence, int]]:
        """Everybody's tokens, in the order in which they were given."""
        long, rest = self._long, self._left
        if long is None or rest <= 0:
            return self._chunks
        more = min(rest // _token_cost(long), long.left)
        return [(seq, tokens + more if seq is long else tokens) for seq, tokens in self._chunks]


def _token_cost(seq: Sequence) -> int:
    return SCORED_COST if seq.owes_scores else 1
