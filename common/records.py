"""What both kinds of worker keep about their work beside scheduling it: counters, token rows, ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal, Protocol

from common.batching import Batch, BatchingCore, RowResult
from common.counters import Counters
from common.effects import Effect, ToCoordinator
from common.ledger import Ledger
from common.messages import Abort, AboutRequest, Ended, Heartbeat, Load, PromptRow, Stop, TokenRow
from common.outbox import Outbox
from common.request import Key, TokenLogprobs
from common.sequence import Sequence
from common.step_times import StepTimes

Outcome = Literal["finished", "aborted", "failed", "handed_over"]


class Workload(Protocol):
    """What a scheduler of either kind says of its hands."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    def sequences(self) -> list[Sequence]: ...


class Records:
    def __init__(self) -> None:
        self.counters = Counters()
        self.outbox = Outbox()
        self.ledger = Ledger()
        self.step_s = 0.0
        self.step_times = StepTimes()

    def late(self, kind: str) -> None:
        """A message for something unknown, ended or older: normal, counted."""
        self.counters.add("late_messages_total", kind=kind)

    def step(self, batch: Batch, step_s: float, now: float) -> None:
        self.step_s = step_s if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * step_s
        self.step_times.observe(batch.shape, step_s, now)
        self.counters.observe("step_seconds", step_s)
        self.counters.observe("batch_size", float(len(batch.rows)))
        self.counters.observe("iteration_tokens_total", float(batch.num_tokens))

    def prefix_lookup(self, seq: Sequence) -> None:
        self.counters.add("prefix_cache_queries_total", float(seq.start_len))
        self.counters.add("prefix_cache_hits_total", float(seq.cached_tokens))

    def say_prompts(self, batch: Batch, results: Seq[RowResult]) -> None:
        """Puts what a step tells of prompts into the next messages to their fronts. Before the step's tokens: the
        front takes those only when the prompt is complete."""
        if not batch.scores:
            return
        for seq, result in zip(batch.rows, results, strict=True):
            logprobs = result.prompt_logprobs
            if logprobs and not seq.over:
                row = PromptRow(seq.request.request_id, seq.key[1], seq.scored, logprobs)
                self.outbox.put_prompt(seq.request.front, row)
                seq.scored += len(logprobs)

    def say_token(
        self,
        seq: Sequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish: str | None,
    ) -> None:
        """Puts the sequence's newest token into the next message to its front."""
        request_id, attempt = seq.key
        first = len(seq.tokens) - 1 - seq.prompt_len
        # Of the prompt alone: a later attempt also finds what earlier ones computed of the answer.
        cached_tokens = None if first or seq.start_len != seq.prompt_len else seq.cached_tokens
        row = TokenRow(request_id, attempt, first, (token,), logprobs, finish, cached_tokens)  # type: ignore[arg-type]
        self.outbox.put(seq.request.front, row)

    def end(
        self,
        seq: Sequence,
        outcome: Outcome,
        now: float,
        *,
        reason: str = "",
        transferred_bytes: int = 0,
        blocks: int = 0,
        retryable: bool = True,
    ) -> Effect:
        """The coordinator's word that this worker is done with the sequence, remembered for repeated commands."""
        ended = Ended(
            *seq.key,
            outcome=outcome,
            reason=reason,
            phase=str(seq.life.phase),
            durations_s=seq.life.durations_s(now),
            cached_tokens=seq.cached_tokens,
            blocks=blocks,
            transferred_bytes=transferred_bytes,
            retryable=retryable,
            lost_tokens=seq.lost_tokens if outcome in ("aborted", "failed") else 0,
        )
        self.ledger.end(ended)
        return ToCoordinator(ended)

    def ended_again(self, message: AboutRequest) -> Effect:
        """The answer to a command for something not live here."""
        self.late(type(message).__name__)
        known = self.ledger.how_ended(message.key)
        return ToCoordinator(known if known is not None else Ended(*message.key, outcome="unknown"))

    def not_to_begin(self, message: Stop | Abort) -> Effect:
        """The same for a Stop or Abort: should it have overtaken what it is about, that finds itself ended."""
        answer = self.ended_again(message)
        if self.ledger.how_ended(message.key) is None:
            self.ledger.end(Ended(*message.key, outcome="unknown"))
        return answer

    def failed(self, key: Key, reason: str) -> Effect:
        """The end of something that is not held here, or not yet: remembered, so that it is not tried again."""
        known = self.ledger.how_ended(key)
        if known is None:
            known = Ended(*key, outcome="failed", reason=reason, retryable=False)
            self.ledger.end(known)
        return ToCoordinator(known)

    def heartbeat(
        self, core: BatchingCore, work: Workload, *, progress_age_s: float, draining: bool
    ) -> Heartbeat:
        pool = core.pool
        load = Load(
            running=work.num_running,
            waiting=work.num_waiting,
            queued_tokens=work.queued_tokens,
            blocks_free=pool.free,
            blocks_held=pool.held,
            blocks_cached=pool.cached,
            step_s=self.step_s,
            step_model=self.step_times.coefficients or (),
        )
        return Heartbeat(
            load=load,
            progress_age_s=progress_age_s,
            live=tuple((*seq.key, str(seq.life.phase)) for seq in work.sequences()),
            last_seq=dict(self.outbox.last_seq),
            counters=dict(self.counters.values),
            histograms=self.counters.histograms(),
            draining=draining,
        )
