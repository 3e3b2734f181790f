"""Who joins, steps, pauses and leaves the decode batch. Pure.

Iteration-level scheduling: every step each decoding sequence advances by one token, and sequences join and leave
between steps. The rules, in the order in which `schedule` applies them:

1. Decoding sequences take the block that their next token needs. When none is left a transfer is revoked or one that
   computes is preempted (`giving_way.py`).
2. Delivered sequences join, then preempted ones resume (recompute, with whatever the prefix cache still holds),
   then local prefills start, when `forming.py` says that they may; each reserves its blocks whole or waits. Who is
   next of each kind, the policy says (`common/ordering.py`).
3. The step's rows: all decoding sequences first, local prefill chunks in what is left of the token budget, or of the
   time that the tightest ITL target of the answers leaves (`chunk_budget.py`); in order, a long prompt leaving half of
   that to short ones (`common/step_budget.py`).
4. Where a device takes a second batch while the first is out, decoding sequences of the first stand in it with a token
   that is not known yet, unless the host must see that token first (`may_go_ahead`); chunks wait until they are back.
   One that turns out to have ended stands there for nothing: its blocks stay its own until the batch is back. Nobody
   is put out and no transfer revoked beside a batch that is out: where a block is missing there is no second batch, and
   the next step is decided by rules 1 to 3 once the first is back.

New transfers are accepted only while nobody preempted waits, a slot will be free, and those who run can go on to their
predicted ends beside it, with a block for each of them to spare (the watermark, `forecast.py`). Local prefills,
preempted ones included, keep the same watermark: without it the last sequence is put out, starts again with what it
gave back, and is put out again. Who is passed by whom, and for whom others give way: `passing.py`. A local prefill that
finds no room may be overtaken by MAX_PASSES transfers and as many other local prefills. Who was preempted is overtaken
by nobody of its class or a lower one that needs blocks.

Why no deadlock: whoever computes takes a block from the others if need be, and fits alone; so the batch stands still
only where one is put out after the other. In the highest class here, whose members are put out by each other alone,
that is bounded: each time either counts towards MAX_VICTIM of one of them, or puts out one that has reached it, of whom
the first by arrival stays, being put out by nobody. While somebody of it waits to come back nobody new of it is let in,
so those are ever the same until one of them ends. And then the next are the highest. Whoever waits for room (delivered
without a slot, preempted, local, offered) waits for those, or for a transfer under way, whose prompt is computed
elsewhere with blocks of its own; or for ASKS_FOR_S, for one of a higher class that may ask again. Those that wait for a
reservation hold no block. The whole picture: `common/lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from functools import partial

from common.batching import Batch, BatchingCore, RowResult
from common.lifecycle import Phase
from common.ordering import Fair, Policy
from common.request import Attempt, Key, Request
from common.sequence import Sequence, finish_reason, may_go_ahead
from common.step_budget import StepBudget
from common.step_times import Coefficients
from common.turns import Turns
from decode_node.chunk_budget import ChunkBudget
from decode_node.forecast import Forecast
from decode_node.forming import Continuous, Forming
from decode_node.giving_way import GivingWay, by_order
from decode_node.held import Held
from decode_node.passing import ASKS_FOR_S, MAX_PASSES, Passing

Outcome = tuple[Sequence, RowResult, str | None]
"""A sequence that has a new token, what the step said of it, and how it ends with that token, if it does."""


class DecodeScheduler:
    def __init__(
        self,
        core: BatchingCore,
        forming: Forming | None = None,
        max_inflight: int = 1,
        policy: Policy | None = None,
    ) -> None:
        """`max_inflight`: batches that may be out at a time, 1 or 2; finished in the order in which they went."""
        assert max_inflight in (1, 2)
        self._core = core
        self._turns = Turns(policy or Fair())
        self._max_inflight = max_inflight
        self._forming = forming or Continuous()
        self._chunk_budget = ChunkBudget(core.max_num_batched_tokens)
        self._forecast = Forecast(core.block_size)
        self.held = Held()
        self.giving_way = GivingWay(core, self.held, self._turns, self._forecast)
        self._full: list[Sequence] = []  # decoding, and lacking a block for the next step
        self._passing = Passing()
        self._local_passes = 0  # transfers accepted since a local prefill was last started
        self._came_before = 0  # … of higher classes since one that had been put out last came back
        self._passes: dict[Key, int] = {}  # local prefills started past one that found no room
        self.opens_at: float | None = None  # when `schedule` is to be called again for those that wait
        self.started: list[Sequence] = []
        """First local chunk is about to run, of a recompute too; the caller clears it."""

    # ------------------------------------------------------------ coming in

    def add(self, request: Request, attempt: Attempt, output_ids: bytes, now: float) -> Sequence:
        """Takes a request to prefill here and decode."""
        seq = self._new(request, attempt, output_ids, Phase.QUEUED, now)
        if not self.held.waiting:
            self._local_passes = 0
        self.held.waiting.append(seq)
        return seq

    def reserve(self, request: Request, attempt: Attempt, output_ids: bytes, now: float) -> Sequence | None:
        """Room for a whole transferred prompt and its first step, or None: later."""
        seq = Sequence(request, attempt, output_ids, self._core.next_arrival(), Phase.KV_READY, now)
        seq.scored = seq.prompt_len  # who computes the prompt says its log-probabilities
        self._turns.enter(seq, now)
        self._chunk_budget.arrives(seq, now)
        if not self._may_reserve(seq, now) or not self._has_room_for_transfer(seq):
            self._passing.told_later(seq, now)
            return None
        self._passing.accepted(seq.key)
        self._local_passes += bool(self.held.waiting)
        self._came_before += bool(self.held.preempted)
        self.held.seqs[seq.key] = self.held.reserved[seq.key] = seq
        return seq

    def _may_reserve(self, seq: Sequence, now: float) -> bool:
        kept_for_another = self._passing.room_is_kept(seq.key, now)
        before = [one for one in self.held.preempted if self._came_before >= MAX_PASSES or not seq.above(one)]
        seated = len(self.held.seqs) - len(self.held.waiting) - len(self.held.preempted) + len(before)
        if before or seated >= self._core.max_num_seqs:
            return False
        return not (kept_for_another or (self.held.waiting and self._local_passes >= MAX_PASSES))

    def _has_room_for_transfer(self, seq: Sequence) -> bool:
        return self._has_room(seq, len(seq.tokens) + 1, len(seq.tokens))

    def _has_room(self, seq: Sequence, num_tokens: int, usable_hits: int) -> bool:
        """Reserves blocks for so many of its tokens, if there are enough and those who run can go on beside it."""
        if self._forecast.refused(seq):
            return False
        if not self._core.reserve(seq, num_tokens=num_tokens, usable_hits=usable_hits):
            return False
        others = [*self.held.with_blocks(), *self.held.reserved.values()]
        available = self._core.pool.available
        if available >= self.held.num_running and self._forecast.stay_within(seq, others, available):
            return True
        self._core.free(seq)
        return False

    def _has_local_room(self, seq: Sequence) -> bool:
        return self._has_room(seq, num_tokens=len(seq.tokens), usable_hits=len(seq.tokens) - 1)

    def fits_reservation(self, key: Key, output_ids: Seq[int]) -> bool:
        """Whether these are the reserved sequence's output tokens and one more."""
        seq = self.held.reserved[key]
        return (
            list(output_ids[:-1]) == seq.tokens[seq.prompt_len :] and len(output_ids) == seq.num_outputs + 1
        )

    def deliver(self, key: Key, token: int, now: float) -> Sequence:
        """The reserved sequence's KV is in place and `token`, its next, was sampled by the prefill worker."""
        seq = self.held.reserved.pop(key)
        seq.num_computed = len(seq.tokens)
        self._core.publish(seq)
        seq.tokens.append(token)
        seq.life.move(Phase.DECODE_READY, now)
        self.held.ready.append(seq)
        return seq

    def _new(
        self, request: Request, attempt: Attempt, output_ids: bytes, phase: Phase, now: float
    ) -> Sequence:
        seq = Sequence(request, attempt, output_ids, self._core.next_arrival(), phase, now)
        assert seq.key not in self.held.seqs
        self._turns.enter(seq, now)
        self._chunk_budget.arrives(seq, now)
        self.held.seqs[seq.key] = seq
        return seq

    # ------------------------------------------------------------ one step

    def schedule(
        self, now: float, step_model: Coefficients | None = None, soon: Iterable[Key] = ()
    ) -> Batch | None:
        """The next step. Beside a batch that is out (`max_inflight`), what is known of it already: see rule 4.
        `step_model`: how long steps take here, where that is known. `soon`: reserved ones that may be whole before it
        has ended."""
        self._forecast.step()
        if self._core.num_out:
            return self._schedule_ahead(now, step_model, soon)
        self._give_way(now)
        self._grow(now)
        return self._fill(self.held.decoding, [], now, step_model, soon)

    def _schedule_ahead(
        self, now: float, step_model: Coefficients | None, soon: Iterable[Key]
    ) -> Batch | None:
        if self._core.num_out >= self._max_inflight:
            return None
        self._core.is_running()
        known = [seq for seq in self.held.decoding if not seq.in_batch]
        ahead = [seq for seq in self.held.decoding if seq.in_batch and may_go_ahead(seq)]
        lacks_block = self._core.lacks_block
        short = [s for s in known if lacks_block(s)] + [s for s in ahead if lacks_block(s, 1)]
        for seq in sorted(short, key=by_order):
            if not self._core.grow(seq, seq.in_batch):
                return None
        self._full.clear()
        return self._fill(known, ahead, now, step_model, soon)

    def _fill(
        self,
        known: list[Sequence],
        ahead: list[Sequence],
        now: float,
        step_model: Coefficients | None,
        soon: Iterable[Key],
    ) -> Batch | None:
        """Who may join, and the step's rows."""
        before = len(self.held.decoding)
        self.opens_at = None
        order = self._line_up(now)
        self._join_delivered(now)
        self._resume(now)
        if not self.held.preempted and self._may_start(now):
            self._start_waiting(now)
        joined = self.held.decoding[before:]
        self._core.add_decode_rows(known if known is self.held.decoding else known + joined)
        self._core.add_rows_ahead(ahead)
        if self.held.prefilling:
            reserved = self.held.reserved
            joining = (*self.held.ready, *reserved.values())
            nearly = [reserved[key] for key in soon if key in reserved]  # room may have been made of one
            tokens = self._chunk_budget.tokens(
                self.held.decoding, self.held.prefilling, step_model, joining, joined, nearly, now
            )
            self._add_chunks(order, tokens, now)
        return self._core.take_batch()

    def _line_up(self, now: float) -> list[Sequence]:
        """Those that wait for something, in order; each kind of them stands in that order from now on."""
        kinds = (self.held.ready, self.held.preempted, self.held.waiting)
        standing = [seq for kind in (*kinds, self.held.prefilling) for seq in kind]
        if len({seq.lane for seq in standing}) > 1:
            self._turns.count_outputs(self.held.decoding)
        return self._turns.line_up(kinds, standing, now)

    def _may_start(self, now: float) -> bool:
        opens_at = self._forming.opens_at(self.held.waiting, len(self.held.seqs) - len(self.held.waiting))
        self.opens_at = None if opens_at is None or opens_at <= now else opens_at
        return opens_at is not None and opens_at <= now

    def _give_way(self, now: float) -> None:
        """To one of a higher class that asks for room."""
        wanted = self._passing.most_wanted(now)
        if wanted is not None:
            preempting = self._came_before < MAX_PASSES
            self.giving_way.to(wanted, partial(self._may_come, wanted, now), preempting, now)

    def _may_come(self, seq: Sequence, now: float) -> bool:
        if not self._may_reserve(seq, now) or not self._has_room_for_transfer(seq):
            return False
        self._core.free(seq)
        return True

    def _grow(self, now: float) -> None:
        full = [s for s in self._full if s.life.phase is Phase.DECODING and self._core.lacks_block(s)]
        full.sort(key=by_order)
        if not self._core.grow_by_one(full):
            for seq in full:
                while seq.life.phase is Phase.DECODING and not self._core.grow(seq):
                    self.giving_way.to_those_who_run(now)
        self._full.clear()  # not before: what raises here is tried again without the newest

    def _join_delivered(self, now: float) -> None:
        while self.held.ready and self._core.free_slots:
            seq = self.held.ready.pop(0)
            self._core.place(seq)
            self._begin_decoding(seq, now)
            self._look_again(seq)

    def _resume(self, now: float) -> None:
        """The first that does not fit holds back the rest."""
        wanted = self._passing.most_wanted(now) if self.held.preempted else None
        while self.held.preempted and self._core.free_slots:
            seq = self.held.preempted[0]
            if wanted is not None and wanted.above(seq) and self._came_before < MAX_PASSES:
                self.opens_at = now + ASKS_FOR_S  # if it does not ask again
                return
            if not self._has_local_room(seq):
                return
            self._came_before = 0
            self._start(self.held.preempted.pop(0), now)

    def _start_waiting(self, now: float) -> None:
        """One that does not fit lets a few behind it pass."""
        passed: list[Key] = []
        wanted = self._passing.most_wanted(now) if self.held.waiting else None
        for seq in list(self.held.waiting):
            if wanted is not None and wanted.above(seq) and self._local_passes < MAX_PASSES:
                self.opens_at = now + ASKS_FOR_S
                return  # in order, so all behind it are of its class or a lower one, but for an aged one
            if not self._core.free_slots or any(self._passes[key] >= MAX_PASSES for key in passed):
                return
            if not self._has_local_room(seq):
                passed.append(seq.key)
                self._passes.setdefault(seq.key, 0)
                continue
            self.held.waiting.remove(seq)
            self._passes.pop(seq.key, None)
            self._local_passes = 0
            self._start(seq, now)
            for key in passed:
                self._passes[key] += 1

    def _start(self, seq: Sequence, now: float) -> None:
        """Local prefill of one whose blocks are reserved."""
        self._core.place(seq)
        self.started.append(seq)
        seq.life.move(Phase.PREFILLING, now)
        self.held.prefilling.append(seq)

    def _add_chunks(self, order: list[Sequence], tokens: int, now: float) -> None:
        budget = StepBudget(tokens, now)
        for seq in order:
            if seq.life.phase is Phase.PREFILLING and not seq.in_batch:
                budget.give(seq)
        for seq, count in budget.chunks():
            self._core.add_row(seq, count)
            self._turns.computes(seq, count, now)

    def chunk_took(self, step_s: float) -> None:
        """A step with local prefill did, from its launch to its results."""
        self._chunk_budget.took(step_s)

    def finish(self, batch: Batch, results: Seq[RowResult], now: float) -> Iterable[Outcome]:
        """Takes a step's results in; each row that sampled gives an outcome. Late results of ended sequences come to
        nothing but their blocks going back. Whoever only has one more token is not looked at."""
        seqs, finishes = batch.rows, list[str | None]([None]) * len(results)
        silent = False
        for row in self._core.take_back(batch, results):
            seq = seqs[row]
            if seq.over or not results[row].ids:
                silent = True
                continue
            if seq.life.phase is Phase.PREFILLING:
                self.held.prefilling.remove(seq)
                self._begin_decoding(seq, now)
            finishes[row] = finish_reason(seq, seq.tokens[-1])
            self._look_again(seq)
        outcomes = zip(seqs, results, finishes, strict=True)
        return outcomes if not silent else [one for one in outcomes if one[1].ids and not one[0].over]

    def _begin_decoding(self, seq: Sequence, now: float) -> None:
        seq.life.move(Phase.DECODING, now)
        self.held.decoding.append(seq)

    def _look_again(self, seq: Sequence) -> None:
        """Says when its tokens are of note again, and whether it lacks a block."""
        block_size = self._core.block_size
        seq.plain_until = min(self._core.blocks_for(len(seq.tokens)) * block_size, seq.max_len - 1)
        if self._core.lacks_block(seq):
            self._full.append(seq)

    # ------------------------------------------------------------ going out

    def end(self, key: Key, phase: Phase, now: float) -> Sequence | None:
        """Ends a sequence in whatever phase it is and frees it (after its step, if one is out). Idempotent."""
        self._passing.forget(key)
        seq = self.held.seqs.pop(key, None)
        if seq is None:
            return None
        self.held.reserved.pop(key, None)
        self._passes.pop(key, None)
        self._turns.count_outputs((seq,))
        self.held.take_out(seq)
        if phase is Phase.FINISHED:
            self._forecast.ended(seq.num_outputs)
        self._forecast.changed()
        seq.over = True
        seq.plain_until = 0
        seq.lost_tokens = seq.computed_tokens
        seq.life.move(phase, now)
        self._core.free(seq)
        return seq
