"""When requests that wait here may start: at once, or a whole batch of them at a time. Pure.

`Continuous` is how kvferry serves: whoever has room starts at the next step, beside those that run (Orca's
iteration-level scheduling). `RequestLevel` is what came before it, kept as a baseline to measure against: a batch is
formed of those that wait, runs until its last member has ended, and only then the next one is formed. Two rules of
forming are in use, and the field's names for them are kept:

- dynamic batching (Triton's `max_queue_delay_microseconds`, TorchServe's `max_batch_delay`): as soon as the batch is
  full, or its first member has waited for the timeout
- static batching: only a full batch starts. That is dynamic batching without its timer, so a timeout of 0 says it,
  as 0 says "none" elsewhere. (With Triton a delay of 0 would start whatever is there; ask for that with 1 ms.) A batch
  that does not become full would wait for ever, so it starts after `STATIC_LIMIT_S` as it is.

A baseline in simple form: members stream, and leave as they end; neither padding nor held-back answers are imitated,
so the real thing would do a little worse.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from common.sequence import Sequence

STATIC_LIMIT_S = 30.0
AT_ONCE = float("-inf")


class Forming(Protocol):
    def opens_at(self, waiting: Seq[Sequence], busy: int) -> float | None:
        """From when on those `waiting` may start beside `busy` others that have, and have not ended. None: not before
        one of either comes or ends."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    def opens_at(self, waiting: Seq[Sequence], busy: int) -> float | None:
        return AT_ONCE


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """`size`: members of a full batch. `timeout_s`: of the first of them; 0: static batching."""

    size: int
    timeout_s: float

    def opens_at(self, waiting: Seq[Sequence], busy: int) -> float | None:
        if busy or not waiting:
            return None
        if len(waiting) >= self.size:
            return AT_ONCE
        return min(seq.life.since for seq in waiting) + (self.timeout_s or STATIC_LIMIT_S)
