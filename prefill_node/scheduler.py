"""Which prompt chunks run in the next step. Pure.

Rules: order is that of the policy (`common/ordering.py`), over prompts that wait and prompts that were begun alike; a
step's budget is given out in that order, a long prompt leaving half of it to short ones (`common/step_budget.py`), a
lower class only as much as lets a higher one keep its targets (`chunk_budget.py`); a
prompt's blocks are reserved whole before its first chunk (so no prompt can hang half-way for lack of blocks), and not
before there is something for it in a step, so that who comes later and goes first finds them; a prompt that does not
fit the free blocks lets smaller ones behind it pass, until `MAX_PASSES` have: from then on nobody overtakes it.
Computed prompts keep their blocks, but no slot, until the transfer says that they were delivered or are not wanted any
more.

Why no deadlock: a prompt waits here before it holds anything, and once it holds its blocks it waits for nothing. So
blocks are held by prompts that are being computed, which takes so many steps, or by computed ones, which leave when a
decode worker has room or a limit of the transfer passes. Reserved chunk by chunk, two prompts could each hold half of
the pool and want the other half. The whole picture: `common/lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.batching import Batch, BatchingCore, RowResult
from common.lifecycle import Phase
from common.ordering import Fair, Policy
from common.request import Attempt, Key, Request, TokenLogprobs
from common.sequence import Sequence, finish_reason
from common.step_budget import StepBudget
from common.step_times import Coefficients
from common.turns import Turns
from prefill_node.chunk_budget import ChunkBudget

MAX_PASSES = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row of a finished step came to. `token` is set when the prompt is complete."""

    seq: Sequence
    token: int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: str | None


class PrefillScheduler:
    def __init__(self, core: BatchingCore, policy: Policy | None = None) -> None:
        self._core = core
        self._turns = Turns(policy or Fair())
        self._chunk_budget = ChunkBudget()
        self._seqs: dict[Key, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._passes: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._seqs)

    def get(self, key: Key) -> Sequence | None:
        return self._seqs.get(key)

    def keys(self) -> list[Key]:
        return list(self._seqs)

    def older_attempts(self, key: Key) -> list[Key]:
        """Keys of the same request with a lower attempt."""
        return [other for other in self._seqs if other[0] == key[0] and other[1] < key[1]]

    def sequences(self) -> list[Sequence]:
        return list(self._seqs.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling)

    @property
    def queued_tokens(self) -> int:
        """Tokens this worker has accepted and not computed yet."""
        return sum(seq.left for seq in self._waiting) + sum(seq.left for seq in self._prefilling)

    def add(self, request: Request, attempt: Attempt, output_ids: bytes, now: float) -> Sequence:
        seq = Sequence(request, attempt, output_ids, self._core.next_arrival(), Phase.QUEUED, now)
        assert seq.key not in self._seqs
        self._seqs[seq.key] = seq
        self._turns.enter(seq, now)
        self._chunk_budget.arrives(seq, now)
        self._waiting.append(seq)
        return seq

    def schedule(self, now: float, step_model: Coefficients | None = None) -> Batch | None:
        """The next step. `step_model`: how long steps take here, where that is known."""
        budget = StepBudget(self._core.max_num_batched_tokens, now)
        passed: list[Key] = []
        kept = False  # room, for one that was passed often enough
        for seq in self._turns.in_turn([*self._waiting, *self._prefilling], now):
            if budget.is_spent:
                break
            if not budget.is_open_to(seq):
                continue
            within = self._chunk_budget.within(seq, step_model, now)
            if within is not None and not budget.narrow(within):
                continue
            if not seq.blocks:
                if kept or self._core.free_slots == 0:
                    continue
                if not self._core.reserve(seq, num_tokens=len(seq.tokens), usable_hits=len(seq.tokens) - 1):
                    passed.append(seq.key)
                    kept = self._passes.get(seq.key, 0) >= MAX_PASSES
                    continue
                self._begin(seq, now)
                kept = self._note_passes(passed)
            budget.give(seq)
        for seq, tokens in budget.chunks():
            self._core.add_row(seq, tokens)
            self._turns.computes(seq, tokens, now)
        return self._core.take_batch()

    def _begin(self, seq: Sequence, now: float) -> None:
        self._waiting.remove(seq)
        self._passes.pop(seq.key, None)
        self._core.place(seq)
        seq.life.move(Phase.PREFILLING, now)
        self._prefilling.append(seq)

    def _note_passes(self, passed: list[Key]) -> bool:
        """One more was begun past these. Whether nobody else may be."""
        for key in passed:
            self._passes[key] = self._passes.get(key, 0) + 1
        return any(self._passes[key] >= MAX_PASSES for key in passed)

    def finish(self, batch: Batch, results: Seq[RowResult], now: float) -> list[Outcome]:
        """Takes a step's results. Late results of ended sequences come to nothing but the blocks going back."""
        self._core.take_back(batch, results)
        return [
            self._sampled(seq, result, now) if result.ids else Outcome(seq, None, None, None)
            for seq, result in zip(batch.rows, results, strict=True)
            if not seq.over
        ]

    def _sampled(self, seq: Sequence, result: RowResult, now: float) -> Outcome:
        token = seq.tokens[-1]
        seq.life.move(Phase.KV_READY, now)
        self._prefilling.remove(seq)
        self._core.leave_slot(seq)
        return Outcome(seq, token, result.logprobs, finish_reason(seq, token))

    def end(self, key: Key, phase: Phase, now: float) -> Sequence | None:
        """Ends a sequence in whatever phase it is and frees it (after its step, if one is out). Idempotent."""
        seq = self._seqs.pop(key, None)
        if seq is None:
            return None
        if seq in self._waiting:
            self._waiting.remove(seq)
        if seq in self._prefilling:
            self._prefilling.remove(seq)
        self._passes.pop(key, None)
        seq.over = True
        seq.lost_tokens = seq.computed_tokens
        seq.life.move(phase, now)
        self._core.free(seq)
        return seq
