"""A decode worker without its sockets: messages and frames in, batches and effects out. Pure.

Stations of a request here, each ended by one line of this file:

    Offer ─▶ room for the whole prompt? Accept(what is missing), else Later ─▶ blocks arrive, are checked, copied
      ─▶ Handover and nothing missing ─▶ Delivered to the prefill worker, Started to the coordinator
      ─▶ DECODE_READY ─ next step ─▶ DECODING ─ token by token to the front ─▶ Ended(finished)
    Decode (collocated, or no prefill worker left) ─▶ QUEUED ─▶ PREFILLING in chunks ─▶ DECODING
    Draining: no Decode is taken, but Offers still are: those are of work that was given out before
    Out of blocks ─▶ PREEMPTED ─▶ PREFILLING again over prompt and output ─▶ DECODING, same tokens

Why no deadlock: a running sequence needs nothing but blocks of this pool, and takes them from transfers not yet
delivered and from other sequences until it is alone; one full-length request always fits alone (checked at
registration). So somebody always finishes (`scheduler.py`), and what waits for room here gets it. The prefill
worker holds its blocks meanwhile, and nobody here waits for those except a transfer, which has a limit. The whole
picture: common/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from common.batching import Batch, BatchingCore, RowResult
from common.counters import count_lost
from common.effects import Effect, ToCoordinator, ToSender
from common.errors import told
from common.lifecycle import Phase
from common.messages import (
    Abort,
    Accepted,
    Block,
    Cancel,
    Cancelled,
    Decode,
    Delivered,
    Handover,
    Heartbeat,
    Later,
    Message,
    Offer,
    Refused,
    Revoke,
    Started,
    Stop,
)
from common.ordering import Policy
from common.records import Outcome as EndOutcome, Records
from common.request import Key, Request, WorkerId, unpack_ids
from common.sequence import Sequence
from decode_node.forming import Forming
from decode_node.scheduler import DecodeScheduler
from transfer.receiver import Ready, TransferReceiver

MAX_WAITING = 256
_FULL_RETRY_S = 0.1


class DecodeWorker:
    """`turn` must be called after every call that may leave something to do; engines call it on each loop."""

    def __init__(
        self,
        core: BatchingCore,
        receiver: TransferReceiver,
        *,
        fingerprint: str,
        block_bytes: int,
        max_waiting: int = MAX_WAITING,
        forming: Forming | None = None,
        vocab_size: int | None = None,
        max_inflight: int = 1,
        policy: Policy | None = None,
    ) -> None:
        """`vocab_size`: prompts of other ids are refused; None: the model takes any. `max_inflight`: batches that may
        be out at a time."""
        self._core = core
        self._scheduler = DecodeScheduler(core, forming, max_inflight, policy)
        self._held = self._scheduler.held
        self._receiver = receiver
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._max_waiting = max_waiting
        self._vocab_size = vocab_size
        self._senders: dict[Key, WorkerId] = {}
        self._moved_bytes: dict[Key, int] = {}
        self._pending: list[Effect] = []
        self.records = Records()
        self.max_inflight = max_inflight
        self.draining = False

    @property
    def idle(self) -> bool:
        """Nothing is held here for anybody."""
        return len(self._held) == 0

    # ------------------------------------------------------------ messages

    def handle(self, message: Message, sender: WorkerId, now: float) -> list[Effect]:
        """A message from the coordinator, or from prefill worker `sender`."""
        match message:
            case Decode():
                return [ToCoordinator(self._decode(message, now))]
            case Offer():
                return self._offered(message, sender, now)
            case Handover():
                return self._handed_over(message, sender, now)
            case Cancel():
                return self._cancelled(message, sender, now)
            case Cancelled():
                return []  # it was forgotten here before that was said
            case Stop():
                return self._end_on_command(message, Phase.FINISHED, "stopped", now)
            case Abort():
                return self._end_on_command(message, Phase.ABORTED, message.reason, now)
        self.records.late(type(message).__name__)
        return []

    def _decode(self, message: Decode, now: float) -> Message:
        key, ledger = message.key, self.records.ledger
        if self._held.get(key) is not None:
            return Accepted(*key)
        ended = ledger.how_ended(key)
        if ended is not None or ledger.is_stale(key):
            self.records.late("Decode")
            return ended or Refused(*key, "a later attempt was dispatched")
        refusal = "draining" if self.draining else self._cannot_ever(message.request)
        if refusal is not None:
            return Refused(*key, refusal)
        if self._held.num_local_waiting >= self._max_waiting:
            return Later(*key, _FULL_RETRY_S)
        self._end_older_attempts(key, now)
        ledger.saw(key)
        self._scheduler.add(message.request, message.attempt, message.output_ids, now)
        return Accepted(*key)

    def _cannot_ever(self, request: Request) -> str | None:
        """A sequence that outgrows the whole pool could only be preempted for ever, so its longest answer counts."""
        if request.prompt_tokens == 0:
            return "the prompt is empty"
        if self._vocab_size is not None:
            ids = unpack_ids(request.prompt_ids)
            if not 0 <= min(ids) <= max(ids) < self._vocab_size:
                return f"the prompt has ids outside the vocabulary of {self._vocab_size}"
        needed = self._core.blocks_for(request.max_total_tokens)
        total = self._core.pool.total
        return f"needs {needed} blocks, this worker has {total}" if needed > total else None

    def _end_older_attempts(self, key: Key, now: float) -> None:
        for other in self._held.older_attempts(key):
            self._pending += self._end(other, Phase.ABORTED, "aborted", "a later attempt was dispatched", now)

    # ------------------------------------------------------------ transfers

    def _offered(self, offer: Offer, sender: WorkerId, now: float) -> list[Effect]:
        key = offer.key
        if key in self._receiver:
            same = self._receiver.from_same_sender(key, sender)
            return self._receiver.answer_again(key) if same else [self._refuse(key, sender, "taken already")]
        if self._held.get(key) is not None:
            return [ToSender(sender, Delivered(*key))]
        ended = self.records.ledger.how_ended(key)
        if ended is not None or self.records.ledger.is_stale(key):
            self.records.late("Offer")
            done = ended is not None and ended.outcome == "finished"
            return [ToSender(sender, Delivered(*key)) if done else self._refuse(key, sender, "ended here")]
        refusal = self._cannot_ever(offer.request)
        if offer.fingerprint != self._fingerprint:
            refusal = f"fingerprint {offer.fingerprint} differs from {self._fingerprint}"
        if refusal is not None:
            return [self._refuse(key, sender, refusal)]
        return self._take_up(offer, sender, now)

    def _take_up(self, offer: Offer, sender: WorkerId, now: float) -> list[Effect]:
        self._end_older_attempts(offer.key, now)
        seq = self._scheduler.reserve(offer.request, offer.attempt, offer.output_ids, now)
        if seq is None:
            return [ToSender(sender, Later(*offer.key, _FULL_RETRY_S))]
        self.records.ledger.saw(offer.key)
        self.records.prefix_lookup(seq)
        self._senders[seq.key] = sender
        hits = seq.cached_tokens // self._core.block_size
        num_blocks = self._core.blocks_for(len(seq.tokens))
        return self._receiver.accept(seq.key, sender, seq.blocks, hits, num_blocks, now)

    def peer_gone(self, worker: WorkerId, now: float) -> list[Effect]:
        """Nothing is sent to others from here."""
        return []

    def _refuse(self, key: Key, sender: WorkerId, reason: str) -> Effect:
        return ToSender(sender, Refused(*key, reason))

    def place(self, header: Block, sender: WorkerId) -> int | None:
        """The pool block that this one's bytes belong in, None where nobody waits for it. The engine copies them
        there and checks the copy, then says `block`, with nothing between."""
        return self._receiver.place(header, sender)

    def block(self, header: Block, sender: WorkerId, good: bool, now: float) -> int | None:
        """A block came; `good` says that its size and checksum are right. Returns the pool block that is filled by
        it, None where it comes to nothing."""
        counters = self.records.counters
        if not good:
            counters.add("kv_checksum_failures_total")
            self._pending += self._receiver.nack(header, sender, "checksum or size is wrong")
        block = self._receiver.block(header, sender, good, now)
        if block is not None:
            counters.add("kv_transfer_bytes_total", float(header.size), channel=header.channel)
        elif good:
            self.records.late("Block")
        return block

    def _handed_over(self, message: Handover, sender: WorkerId, now: float) -> list[Effect]:
        key = message.key
        if key in self._receiver:
            if not self._receiver.from_same_sender(key, sender):
                return [self._refuse(key, sender, "taken already")]
            if not self._scheduler.fits_reservation(key, unpack_ids(message.output_ids)):
                return self._end(
                    key, Phase.FAILED, "failed", "the hand-over is not of the request offered", now
                )
            return self._receiver.handed_over(message, now)
        if self._held.get(key) is not None:
            return [ToSender(sender, Delivered(*key))]
        self.records.late("Handover")
        ended = self.records.ledger.how_ended(key)
        if ended is not None:
            done = ended.outcome == "finished"
            return [ToSender(sender, Delivered(*key)) if done else self._refuse(key, sender, "ended here")]
        return [ToSender(sender, Revoke(*key, "not accepted here"))]

    def _deliver_whole(self, now: float) -> list[Effect]:
        """Takes over what has become whole. Before each step too, so that it joins that very step. Over one of them we
        may err: the others go on."""
        effects: list[Effect] = []
        for ready in self._receiver.ready():
            try:
                effects += self._delivered(ready, now)
            except Exception as error:
                effects += self.fail(ready.key, error, now)
        return effects

    def _delivered(self, ready: Ready, now: float) -> list[Effect]:
        key, handover = ready.key, ready.handover
        outputs = unpack_ids(handover.output_ids)
        seq = self._scheduler.deliver(key, outputs[-1], now)
        seq.cached_tokens = seq.found_tokens = max(seq.cached_tokens, handover.cached_tokens)
        self._moved_bytes[key] = ready.blocks * self._block_bytes
        logprobs = None if handover.logprobs is None else (handover.logprobs,)
        self.records.say_token(seq, outputs[-1], logprobs, None)
        started = Started(*key, phase=str(seq.life.phase))
        return [ToSender(self._senders[key], Delivered(*key)), ToCoordinator(started)]

    def _cancelled(self, message: Cancel, sender: WorkerId, now: float) -> list[Effect]:
        """Only what is not delivered can be cancelled by its sender; the answer is the same in every case."""
        answer = ToSender(sender, Cancelled(*message.key))
        if message.key not in self._receiver or not self._receiver.from_same_sender(message.key, sender):
            self.records.late("Cancel")
            return [answer]
        self._receiver.drop(message.key)
        self._senders.pop(message.key, None)
        self._scheduler.end(message.key, Phase.ABORTED, now)
        return [answer]

    # ------------------------------------------------------------ steps

    def schedule(self, now: float) -> Batch | None:
        scheduler, giving_way, counters = self._scheduler, self._scheduler.giving_way, self.records.counters
        self._pending += self._deliver_whole(now)
        soon = self._receiver.nearly_whole(self._core.max_num_batched_tokens // self._core.block_size)
        batch = scheduler.schedule(now, self.records.step_times.lately, soon)
        for victim, lost in giving_way.put_out:
            counters.add("num_preemptions_total")
            counters.add("tier_preemptions_total", tier=victim.request.tier)
            count_lost(counters, lost, cause="preemption", tier=victim.request.tier)
        for key in giving_way.revoked:
            self._senders.pop(key, None)
            self._pending += self._receiver.revoke(key, "out of blocks")
            counters.add("kv_transfer_failures_total", reason="revoked")
        giving_way.revoked.clear()
        for seq in scheduler.started:
            if seq.preemptions == 0:
                self.records.prefix_lookup(seq)
        said = [(seq, Phase.PREEMPTED) for seq, _ in giving_way.put_out]
        said += [(seq, Phase.PREFILLING) for seq in scheduler.started]
        self._pending += [ToCoordinator(Started(*seq.key, phase=str(phase))) for seq, phase in said]
        giving_way.put_out.clear()
        scheduler.started.clear()
        return batch

    def finish(self, batch: Batch, results: Seq[RowResult], step_s: float, now: float) -> list[Effect]:
        self.records.step(batch, step_s, now)
        chunk_tokens = batch.num_tokens - sum(batch.samples)
        if chunk_tokens:
            self.records.counters.add("local_prefill_tokens_total", float(chunk_tokens))
            self._scheduler.chunk_took(step_s)
            self._count_recomputed(batch)
        self.records.say_prompts(batch, results)
        effects: list[Effect] = []
        say_token = self.records.say_token
        for seq, result, finish in self._scheduler.finish(batch, results, now):
            try:
                say_token(seq, seq.tokens[-1], result.logprobs, finish)
                if finish is not None:
                    effects += self._finished(seq, finish, now)
            except Exception as error:  # over one of them we may err: the others go on
                effects += self.fail(seq.key, error, now)
        return effects

    def _count_recomputed(self, batch: Batch) -> None:
        """Prompt tokens whose KV was computed before, here or elsewhere, and was thrown away or is out of reach."""
        for seq, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            cause = "preemption" if seq.preemptions else "next_attempt" if seq.num_outputs else ""
            tokens = min(start + count, seq.prompt_len) - start
            if cause and tokens > 0:
                self.records.counters.add("recomputed_prompt_tokens_total", float(tokens), cause=cause)

    def _finished(self, seq: Sequence, finish: str, now: float) -> list[Effect]:
        self.records.counters.observe("request_decode_time_seconds", seq.life.seconds_in(Phase.DECODING, now))
        return self._end(seq.key, Phase.FINISHED, "finished", finish, now)

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
        """Transfers that became whole, deadlines, and what has piled up to be said."""
        effects = self._deliver_whole(now)
        said, lost = self._receiver.expire(now)
        for key in lost:
            self.records.counters.add("kv_transfer_failures_total", reason="timeout")
            self._senders.pop(key, None)
            self._scheduler.end(key, Phase.ABORTED, now)
        pending, self._pending = self._pending, []
        return pending + effects + said + self._receiver.flush() + self.records.outbox.flush()

    def next_deadline(self) -> float | None:
        deadlines = (self._receiver.next_deadline(), self._scheduler.opens_at)
        return min((time for time in deadlines if time is not None), default=None)

    def heartbeat(self, progress_age_s: float) -> Heartbeat:
        return self.records.heartbeat(
            self._core, self._held, progress_age_s=progress_age_s, draining=self.draining
        )

    def abort(self, key: Key, reason: str, now: float) -> list[Effect]:
        """The coordinator does not know it (heartbeat), or this process is shutting down."""
        return self._end(key, Phase.ABORTED, "aborted", reason, now)

    def fail(self, key: Key, error: BaseException, now: float) -> list[Effect]:
        """We erred over it: whatever is held for it is freed, and it is not tried elsewhere."""
        self.records.counters.add("internal_errors_total")
        held = key in self._held
        said = self._end(key, Phase.FAILED, "failed", told(error), now, retryable=False)
        return said if held else [*said, self.records.failed(key, told(error))]

    def live_keys(self) -> list[Key]:
        return self._held.keys()

    def _end_on_command(self, message: Stop | Abort, phase: Phase, reason: str, now: float) -> list[Effect]:
        if message.key not in self._held:
            return [self.records.not_to_begin(message)]
        outcome: EndOutcome = "finished" if phase is Phase.FINISHED else "aborted"
        return self._end(message.key, phase, outcome, reason, now)

    def _end(
        self,
        key: Key,
        phase: Phase,
        outcome: EndOutcome,
        reason: str,
        now: float,
        *,
        retryable: bool = True,
    ) -> list[Effect]:
        """The one end of a request on this worker."""
        effects: list[Effect] = []
        sender = self._senders.pop(key, None)
        moved = self._moved_bytes.pop(key, 0)
        if self._receiver.drop(key) and sender is not None:
            effects.append(ToSender(sender, Cancel(*key, reason or outcome)))
        seq = self._scheduler.end(key, phase, now)
        if seq is None:
            return effects
        self.records.counters.observe("request_preemptions", float(seq.preemptions))
        blocks = self._core.blocks_for(len(seq.tokens))
        ended = self.records.end(
            seq, outcome, now, reason=reason, blocks=blocks, transferred_bytes=moved, retryable=retryable
        )
        return [*effects, ended]
