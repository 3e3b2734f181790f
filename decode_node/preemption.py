"""Who is put out when no block is left, and what becomes of its KV. Pure.

The victim is the first of these that tells two apart:

1. who is of the lowest class
2. who has been a victim less than MAX_VICTIM times
3. whose tenant is furthest over its share (its lane was served most, by weight: `common/turns.py`)
4. who came last

So one request is put out by others of its class at most MAX_VICTIM times while any of them has not been. The third
rule moves as tenants are served: two of them could put each other out for ever, but for the second rule. Those who have
been victims so often are told apart by their arrival alone, so that the first of them stays: `scheduler.py` says why
somebody always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Protocol

from common.batching import BatchingCore
from common.sequence import Sequence

MAX_VICTIM = 3

Served = Callable[[Sequence], float]
"""How much the sequence's lane was served, by weight."""


class Eviction(Protocol):
    """What becomes of a victim's KV. Where host memory is to take it, this is the place: copy the blocks there before
    they are freed, and let `BatchingCore.reserve` bring them back."""

    def put_out(self, core: BatchingCore, seq: Sequence) -> int:
        """Gives up its blocks; how many tokens must be computed again for it."""
        ...


class Recompute:
    """It goes. What the prefix cache still holds of it when it comes back need not be computed again."""

    def put_out(self, core: BatchingCore, seq: Sequence) -> int:
        lost = seq.computed_tokens
        core.free(seq)
        return lost


class Preemption:
    def __init__(self, served: Served, eviction: Eviction | None = None) -> None:
        self._served = served
        self._eviction = eviction or Recompute()

    def victim(self, holders: Seq[Sequence]) -> Sequence:
        """Of those that hold blocks and are not waited for elsewhere, at least one."""
        return max(holders, key=self._rank)

    def _rank(self, seq: Sequence) -> tuple[int, bool, float, int]:
        spared = seq.preemptions >= MAX_VICTIM
        return (seq.lane[0], not spared, 0.0 if spared else self._served(seq), seq.arrival)

    def put_out(self, core: BatchingCore, seq: Sequence) -> int:
        seq.preemptions += 1
        return self._eviction.put_out(core, seq)
