"""A prefill worker without its sockets: messages in, batches and effects out. Pure.

Stations of a request here, each ended by one line of this file:

    Prefill ─▶ QUEUED ─ blocks reserved ─▶ PREFILLING ─ first chunk: Offer to the decode worker
      ─ chunks, complete blocks shipped meanwhile ─▶ last chunk samples the next token, said to the front at once
      ─▶ KV_READY ─ Handover, until Delivered ─▶ freed into the prefix cache, Ended(handed_over)
    An answer that ends with its first token never needs the decode worker: Ended(finished).
    Abort, Stop, a failed transfer: Ended at once, blocks back, the decode worker told to forget.

Why no deadlock: this worker never waits for a decode worker in order to compute; it only stops admitting prompts
when its blocks are held by finished ones, and those leave when a decode worker accepts. A decode worker's running
requests never need anything from here, so it always comes to accept (see decode_node/worker.py, and for the whole
picture common/lifecycle.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from common.batching import Batch, BatchingCore, RowResult
from common.effects import Effect, ToCoordinator
from common.errors import told
from common.lifecycle import Phase
from common.messages import (
    Abort,
    AboutRequest,
    Accepted,
    Block,
    Handover,
    Heartbeat,
    Later,
    Message,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Started,
    Stop,
)
from common.ordering import Policy
from common.prefix import join_hashes
from common.records import Outcome as EndOutcome, Records
from common.request import Key, WorkerId, pack_ids
from common.sequence import Sequence
from prefill_node.scheduler import Outcome, PrefillScheduler
from transfer.sender import SenderEvent, SendFailed, Sent, TransferSender

_QUEUE_FULL_RETRY_S = 0.1


class PrefillWorker:
    """`turn` must be called after every call that may leave something to do; engines call it on each loop."""

    max_inflight = 1

    def __init__(
        self,
        core: BatchingCore,
        sender: TransferSender,
        *,
        fingerprint: str,
        block_bytes: int,
        max_waiting: int = 256,
        policy: Policy | None = None,
    ) -> None:
        self._core = core
        self._scheduler = PrefillScheduler(core, policy)
        self._sender = sender
        self._fingerprint = fingerprint
        self._max_waiting = max_waiting
        self._targets: dict[Key, PeerAddress] = {}
        self._pending: list[Effect] = []
        self.records = Records()
        self.draining = False

    @property
    def idle(self) -> bool:
        """Nothing is held here for anybody."""
        return len(self._scheduler) == 0 and len(self._sender) == 0

    # ------------------------------------------------------------ messages

    def handle(self, message: Message, sender: WorkerId, now: float) -> list[Effect]:
        """A message from the coordinator, or from decode worker `sender`."""
        match message:
            case Prefill():
                return [ToCoordinator(self._prefill(message, now))]
            case Rebind():
                return self._rebind(message, now)
            case Stop():
                return self._end_on_command(message, Phase.FINISHED, "stopped", now)
            case Abort():
                return self._end_on_command(message, Phase.ABORTED, message.reason, now)
            case AboutRequest():
                return self._from_receiver(message, sender, now)
        self.records.late(type(message).__name__)
        return []

    def _prefill(self, message: Prefill, now: float) -> Message:
        key, ledger = message.key, self.records.ledger
        if self._scheduler.get(key) is not None:
            return Accepted(*key, self._targets.get(key))
        ended = ledger.how_ended(key)
        if ended is not None or ledger.is_stale(key):
            self.records.late("Prefill")
            return ended or Refused(*key, "a later attempt was dispatched")
        refusal = self._cannot_ever(message)
        if refusal is not None:
            return Refused(*key, refusal)
        if self._scheduler.num_waiting >= self._max_waiting:
            return Later(*key, _QUEUE_FULL_RETRY_S)
        self._end_older_attempts(key, now)
        ledger.saw(key)
        self._scheduler.add(message.request, message.attempt, message.output_ids, now)
        if message.target is not None:
            self._targets[key] = message.target
        return Accepted(*key, message.target)

    def _cannot_ever(self, message: Prefill) -> str | None:
        if self.draining:
            return "draining"
        if message.request.prompt_tokens == 0:
            return "the prompt is empty"
        needed = self._core.blocks_for(message.request.prompt_tokens + len(message.output_ids) // 4)
        total = self._core.pool.total
        return f"needs {needed} blocks, this worker has {total}" if needed > total else None

    def _end_older_attempts(self, key: Key, now: float) -> None:
        for other in self._scheduler.older_attempts(key):
            self._pending += self._end(other, Phase.ABORTED, "aborted", "a later attempt was dispatched", now)

    def _rebind(self, message: Rebind, now: float) -> list[Effect]:
        if self._scheduler.get(message.key) is None:
            return [self.records.ended_again(message)]
        if message.key not in self._targets:  # its one token ends the answer: nobody takes it over
            return [ToCoordinator(Accepted(*message.key, message.target))]
        self._targets[message.key] = message.target
        said = self._sender.rebind(message.key, message.target, now)
        return [*said, ToCoordinator(Accepted(*message.key, message.target))]

    def _end_on_command(self, message: Stop | Abort, phase: Phase, reason: str, now: float) -> list[Effect]:
        if self._scheduler.get(message.key) is None:
            return [self.records.not_to_begin(message)]
        outcome: EndOutcome = "finished" if phase is Phase.FINISHED else "aborted"
        return self._end(message.key, phase, outcome, reason, now)

    def _from_receiver(self, message: AboutRequest, sender: WorkerId, now: float) -> list[Effect]:
        if not self._sender.is_about(message, sender):
            self.records.late(type(message).__name__)
        effects, events = self._sender.receive(message, sender, now)
        return effects + self._transfer_events(events, now)

    def peer_gone(self, worker: WorkerId, now: float) -> list[Effect]:
        """Nobody answers for decode worker `worker` any more."""
        effects, events = self._sender.peer_gone(worker, now)
        return effects + self._transfer_events(events, now)

    def _transfer_events(self, events: list[SenderEvent], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            match event:
                case Sent(key, blocks, seconds):
                    self.records.counters.observe("kv_transfer_seconds", seconds)
                    effects += self._end(key, Phase.FINISHED, "handed_over", "", now, blocks=blocks)
                case SendFailed(key, cause, reason):
                    if cause != "cancelled":  # an end of its request, counted as such
                        self.records.counters.add("kv_transfer_failures_total", reason=cause)
                    effects += self._end(key, Phase.FAILED, "failed", f"transfer: {reason}", now)
        return effects

    def place(self, header: Block, sender: WorkerId) -> int | None:
        """Nobody sends blocks here."""
        return None

    def block(self, header: Block, sender: WorkerId, good: bool, now: float) -> int | None:
        """Nobody sends blocks here."""
        self.records.late("Block")
        return None

    # ------------------------------------------------------------ steps

    def schedule(self, now: float) -> Batch | None:
        batch = self._scheduler.schedule(now, self.records.step_times.lately)
        for seq in batch.rows if batch is not None else ():
            if seq.num_computed == seq.cached_tokens:
                try:
                    self._begin(seq, now)
                except Exception as error:  # the batch is made: it runs for the others
                    self._pending += self.fail(seq.key, error, now)
        return batch

    def _begin(self, seq: Sequence, now: float) -> None:
        """The first chunk is about to run."""
        self.records.prefix_lookup(seq)
        self._pending.append(ToCoordinator(Started(*seq.key, phase=str(seq.life.phase))))
        if seq.key in self._targets:
            self._open_transfer(seq, now)

    def _open_transfer(self, seq: Sequence, now: float) -> None:
        if seq.max_outputs - seq.num_outputs <= 1:
            del self._targets[seq.key]  # this worker's token is the last one
            return
        offer = Offer(
            *seq.key,
            request=seq.request,
            output_ids=pack_ids(seq.tokens[seq.prompt_len :]),
            num_tokens=len(seq.tokens),
            hashes=join_hashes(seq.chain),
            fingerprint=self._fingerprint,
        )
        self._pending += self._sender.open(offer, self._targets[seq.key], seq.blocks, now)
        self._sender.blocks_computed(seq.key, seq.num_computed // self._core.block_size, now)

    def finish(self, batch: Batch, results: Seq[RowResult], step_s: float, now: float) -> list[Effect]:
        self.records.step(batch, step_s, now)
        self.records.counters.add("computed_tokens_total", float(batch.num_tokens))
        self.records.say_prompts(batch, results)
        effects: list[Effect] = []
        for outcome in self._scheduler.finish(batch, results, now):
            try:
                effects += self._after_row(outcome, now)
            except Exception as error:  # over one of them we may err: the others go on
                effects += self.fail(outcome.seq.key, error, now)
        return effects

    def _after_row(self, outcome: Outcome, now: float) -> list[Effect]:
        seq = outcome.seq
        if outcome.token is None:
            self._sender.blocks_computed(seq.key, seq.num_computed // self._core.block_size, now)
            return []
        self.records.say_token(seq, outcome.token, outcome.logprobs, outcome.finish)
        self.records.counters.observe(
            "request_prefill_time_seconds", seq.life.seconds_in(Phase.PREFILLING, now)
        )
        if outcome.finish is not None:
            return self._end(seq.key, Phase.FINISHED, "finished", outcome.finish, now)
        if seq.key not in self._targets:
            return self._end(seq.key, Phase.FAILED, "failed", "dispatched without a decode worker", now)
        handover = Handover(
            *seq.key,
            output_ids=pack_ids(seq.tokens[seq.prompt_len :]),
            logprobs=outcome.logprobs[0] if outcome.logprobs else None,
            num_blocks=self._core.blocks_for(seq.num_computed),
            cached_tokens=seq.cached_tokens,
        )
        return self._sender.prompt_computed(handover, now)

    def fail_row(self, seq: Sequence, reason: str, now: float) -> list[Effect]:
        """Its row raised, alone: it is not tried elsewhere. To be called before `finish`, which frees it."""
        if seq.over:
            return []
        return self._end(seq.key, Phase.FAILED, "failed", reason, now, retryable=False)

    def abandon(self, batch: Batch) -> None:
        """Instead of `finish`, or after it raised: its rows were failed, and what they hold goes back."""
        self._core.abandon(batch)

    def unmake(self) -> None:
        """After `schedule` raised: nobody stands in the batch that it was about to give."""
        self._core.unmake()

    # ------------------------------------------------------------ every turn

    def turn(self, now: float) -> list[Effect]:
        """Deadlines, frames that may leave, and what has piled up to be said."""
        effects, events = self._sender.expire(now)
        effects += self._transfer_events(events, now)
        pending, self._pending = self._pending, []
        return pending + effects + self.records.outbox.flush() + self._sender.pump(now)

    def next_deadline(self) -> float | None:
        return self._sender.next_deadline()

    def heartbeat(self, progress_age_s: float) -> Heartbeat:
        return self.records.heartbeat(
            self._core, self._scheduler, progress_age_s=progress_age_s, draining=self.draining
        )

    def abort(self, key: Key, reason: str, now: float) -> list[Effect]:
        """The coordinator does not know it (heartbeat), or this process is shutting down."""
        return self._end(key, Phase.ABORTED, "aborted", reason, now)

    def fail(self, key: Key, error: BaseException, now: float) -> list[Effect]:
        """We erred over it: whatever is held for it is freed, and it is not tried elsewhere."""
        self.records.counters.add("internal_errors_total")
        held = self._scheduler.get(key) is not None
        said = self._end(key, Phase.FAILED, "failed", told(error), now, retryable=False)
        return said if held else [*said, self.records.failed(key, told(error))]

    def live_keys(self) -> list[Key]:
        return self._scheduler.keys()

    def _end(
        self,
        key: Key,
        phase: Phase,
        outcome: EndOutcome,
        reason: str,
        now: float,
        *,
        blocks: int = 0,
        retryable: bool = True,
    ) -> list[Effect]:
        """The one end of a request on this worker."""
        self._targets.pop(key, None)
        effects = self._sender.cancel(key, reason or outcome, now)
        seq = self._scheduler.end(key, phase, now)
        if seq is None:
            return effects
        # Bytes moved are counted by the receiver, which verifies them.
        ended = self.records.end(seq, outcome, now, reason=reason, blocks=blocks, retryable=retryable)
        return [*effects, ended]
