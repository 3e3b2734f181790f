"""The sending side of KV transfers: what a prefill worker offers, ships and hands over. Pure.

    open ─ Offer ─▶ OFFERED ◀─ Later (offer again after a pause)
    Accept(wanted) ─▶ ACCEPTED ─ blocks as chunks finish, under the peer's byte window ─▶ SENDING
    prompt computed and all wanted blocks sent ─ Handover ─▶ (again every `retry_s` until) Delivered
    Revoke ─▶ REVOKED ─▶ OFFERED again, to the same or (Rebind) another worker; every block is still here
    Refused, too many Nacks, no progress for `timeout_s` ─▶ FAILED, and the peer is told to forget
    Cancel from the peer ─▶ FAILED, answered

Any message may be lost, doubled, late or out of order. What the peer must know is said again until answered:
the offer, the hand-over, a cancellation. A peer that answers an offer we no longer stand by (a late or doubled
copy of it) is told to forget at once, else its blocks would wait there for its own limit. "Later" counts as
progress for `patience_s` in all: no wait is without a limit.

Bytes in flight are counted per peer as a set of frames, cleared by Credit, Nack, Delivered and the end of a
transfer; when a transfer has had no answer for two `retry_s` its frames leave the window, so a lost Credit cannot
shrink it for ever. They are not sent again on a guess: the peer names what is missing once it has the hand-over.
Why no deadlock: the window, smaller than a prompt, is only ever filled by frames that were sent, never by ones that are
still to be computed. The prompt's blocks wait here for the peer's room and for nothing else (`common/lifecycle.py`).

How a block's bytes get there is the channel's affair (`channel.py`). Some copy it when it is sent, some have the
receiver read it later; a block may be freed and written over as soon as its transfer has ended here, whichever it
is, because the checksum refuses what is not the block that was sent (the argument: `door.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from common.effects import Effect, SendBlock, ToReceiver
from common.lifecycle import TransferLife, TransferPhase
from common.messages import (
    AboutRequest,
    Accept,
    Cancel,
    Cancelled,
    Credit,
    Delivered,
    Handover,
    Later,
    Nack,
    Offer,
    PeerAddress,
    Refused,
    Revoke,
)
from common.request import Key, WorkerId
from transfer.cancelling import Cancellations
from transfer.in_flight import WINDOW_BYTES, InFlight
from transfer.outgoing import Outgoing

MAX_NACKS = 2
MAX_PEERS = 4096
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Sent:
    """The decode worker has verified every block and owns the request."""

    key: Key
    blocks: int
    seconds: float


Cause = Literal["refused", "cancelled", "bad_blocks", "timeout", "unreachable"]


@dataclass(frozen=True, slots=True)
class SendFailed:
    """`cancelled`: the request has ended at the decode worker, so the transfer is not wanted any more."""

    key: Key
    cause: Cause
    reason: str


SenderEvent = Sent | SendFailed


class TransferSender:
    def __init__(
        self,
        *,
        block_bytes: int,
        window_bytes: int = WINDOW_BYTES,
        retry_s: float = 1.0,
        timeout_s: float = 30.0,
        patience_s: float = 120.0,
    ) -> None:
        self._block_bytes = block_bytes
        self._window_frames = max(1, window_bytes // block_bytes)
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._look_at = _NEVER  # no deadline of any transfer lies before this
        self._outgoing: dict[Key, Outgoing] = {}
        self._cancelling = Cancellations(retry_s)
        self._addresses: dict[WorkerId, PeerAddress] = {}  # of the peers last spoken to
        self._in_flight = InFlight()

    def __len__(self) -> int:
        return len(self._outgoing)

    def __contains__(self, key: Key) -> bool:
        return key in self._outgoing

    @property
    def settled(self) -> bool:
        """Nothing is under way, in flight, or waiting for its answer."""
        return not (self._outgoing or self._cancelling or self._in_flight)

    def is_about(self, message: AboutRequest, sender: WorkerId) -> bool:
        """Whether something here still waits for such a word from `sender`."""
        if isinstance(message, Cancelled):
            return (message.key, sender) in self._cancelling
        out = self._outgoing.get(message.key)
        return out is not None and out.target.worker == sender

    @property
    def bytes_in_flight(self) -> int:
        return len(self._in_flight) * self._block_bytes

    # ------------------------------------------------------------ from the prefill worker

    def open(self, offer: Offer, target: PeerAddress, blocks: list[int], now: float) -> list[Effect]:
        """Starts a transfer; `blocks` are the pool blocks, all reserved, none computed yet."""
        assert offer.key not in self._outgoing
        out = Outgoing(
            offer,
            target,
            blocks,
            opened=now,
            bound=now,
            progress=now,
            answered=now,
            ask_at=now + self._retry_s,
            window_frames=self._window_frames,
        )
        self._outgoing[offer.key] = out
        self._look_by(out.ask_at)
        self._know(target)
        return [ToReceiver(target, offer)]

    def blocks_computed(self, key: Key, count: int, now: float) -> None:
        """The first `count` blocks of the prompt have all their KV. Counts as progress: the limit is for a peer
        that does not move, not for a long prompt."""
        out = self._outgoing.get(key)
        if out is not None:
            out.computed = max(out.computed, count)
            out.progress = now

    def prompt_computed(self, handover: Handover, now: float) -> list[Effect]:
        """The whole prompt is computed: hand over as soon as the blocks are out."""
        out = self._outgoing.get(handover.key)
        if out is None:
            return []
        out.handover = handover
        out.progress = now
        out.computed = len(out.blocks)
        return self._hand_over_if_sent(out, now)

    def rebind(self, key: Key, target: PeerAddress, now: float) -> list[Effect]:
        """Another decode worker takes it: nothing is prefilled again."""
        out = self._outgoing.get(key)
        if out is None or out.target == target:
            return []
        effects = self._say_cancel(out, "rebound", now)
        if out.life.phase is not TransferPhase.REVOKED:
            out.life.move(TransferPhase.REVOKED)
        out.target = target
        self._know(target)
        out.bound = out.progress = now
        self._cancelling.forget(key, target.worker)
        return effects + self._offer_again(out, now)

    def cancel(self, key: Key, reason: str, now: float) -> list[Effect]:
        """The request ended here. The peer is told until it answers; the blocks are free at once. Idempotent."""
        out = self._outgoing.pop(key, None)
        if out is None:
            return []
        out.life.move(TransferPhase.CANCELLED)
        return self._say_cancel(out, reason, now)

    # ------------------------------------------------------------ from the decode worker

    def receive(
        self, message: AboutRequest, sender: WorkerId, now: float
    ) -> tuple[list[Effect], list[SenderEvent]]:
        """Anything a decode worker says. What is not about a live transfer with that worker comes to nothing."""
        if isinstance(message, Cancelled):
            self._cancelling.forget(message.key, sender)
            return [], []
        if isinstance(message, Cancel):
            return self._called_off(message, sender)
        out = self._outgoing.get(message.key)
        if out is None or out.target.worker != sender:
            return self._not_ours(message, sender), []
        out.answered = now
        match message:
            case Accept():
                return self._accepted(out, message, now), []
            case Later():
                if now - out.bound < self._patience_s:
                    out.progress = now
                self._ask_by(out, now + min(message.retry_after_s, self._timeout_s))
                return [], []
            case Credit():
                return self._credited(out, message, now), []
            case Nack():
                return self._nacked(out, message, now)
            case Delivered():
                return [], [self._delivered(out, now)]
            case Revoke():
                self._revoked(out, now)
                return [], []
            case Refused():
                return self._fail(out, "refused", f"refused by {sender}: {message.reason}", now)
        return [], []

    def _know(self, target: PeerAddress) -> None:
        self._addresses.pop(target.worker, None)
        self._addresses[target.worker] = target
        if len(self._addresses) > MAX_PEERS:
            del self._addresses[next(iter(self._addresses))]

    def _called_off(self, message: Cancel, sender: WorkerId) -> tuple[list[Effect], list[SenderEvent]]:
        """The peer has forgotten it: it need not be told so, only that it was heard, whatever is known of it here."""
        address = self._addresses.get(sender)
        answer: list[Effect] = [] if address is None else [ToReceiver(address, Cancelled(*message.key))]
        out = self._outgoing.get(message.key)
        if out is None or out.target.worker != sender:
            return answer, []
        out.life.move(TransferPhase.FAILED)
        self._forget(out)
        return answer, [SendFailed(out.key, "cancelled", f"called off by {sender}: {message.reason}")]

    def _not_ours(self, message: AboutRequest, sender: WorkerId) -> list[Effect]:
        """The peer holds blocks for a transfer that has ended, or that went to another worker."""
        address = self._addresses.get(sender)
        if address is None or not isinstance(message, (Accept, Nack)):
            return []
        return [ToReceiver(address, Cancel(*message.key, "not offered any more"))]

    def _accepted(self, out: Outgoing, message: Accept, now: float) -> list[Effect]:
        if out.life.phase is not TransferPhase.OFFERED:
            return []  # an answer to a repeated offer
        out.life.move(TransferPhase.ACCEPTED)
        out.progress = now
        self._ask_by(out, now + self._retry_s)
        out.window_frames = max(1, min(self._window_frames, message.credit_bytes // self._block_bytes))
        out.to_send = deque(sorted({index for index in message.wanted if index < len(out.blocks)}))
        return self._hand_over_if_sent(out, now)

    def _credited(self, out: Outgoing, message: Credit, now: float) -> list[Effect]:
        out.progress = now
        self._in_flight.arrived(out.target.worker, out.key, message.indices)
        return []

    def _nacked(self, out: Outgoing, message: Nack, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        if out.life.phase not in (TransferPhase.ACCEPTED, TransferPhase.SENDING):
            return [], []
        self._in_flight.arrived(out.target.worker, out.key, message.indices)
        waiting = set(out.to_send)
        for index in message.indices:
            if index in waiting or index >= len(out.blocks):
                continue
            out.nacks[index] = out.nacks.get(index, 0) + 1
            if out.nacks[index] > MAX_NACKS:
                return self._fail(out, "bad_blocks", f"block {index} did not arrive: {message.reason}", now)
            waiting.add(index)
        out.to_send = deque(sorted(waiting))
        self._ask_by(out, now + self._retry_s)
        return [], []

    def _delivered(self, out: Outgoing, now: float) -> SenderEvent:
        if out.life.phase in (TransferPhase.OFFERED, TransferPhase.REVOKED):
            # The peer had it all the time and our view was behind (its Accept was lost).
            out.life = TransferLife(TransferPhase.ACCEPTED)
        out.life.move(TransferPhase.DELIVERED)
        self._forget(out)
        return Sent(out.key, out.blocks_sent, now - out.opened)

    def _revoked(self, out: Outgoing, now: float) -> None:
        if out.life.phase is not TransferPhase.REVOKED:
            out.life.move(TransferPhase.REVOKED)
            self._in_flight.forget(out.target.worker, out.key)
            out.to_send.clear()
            self._ask_by(out, now + self._retry_s)
            out.bound = out.progress = now

    # ------------------------------------------------------------ on every turn of the loop

    def pump(self, now: float) -> list[Effect]:
        """Frames that may leave now: computed, wanted, inside each peer's window, transfers taking turns.

        To be carried out before anything else is said here: the next call may free a block that stands among them.
        """
        effects: list[Effect] = []
        turns = deque(out for out in self._outgoing.values() if out.sendable)
        while turns:
            out = turns.popleft()
            count = out.next_message(out.window_frames - self._in_flight.count(out.target.worker))
            if count:
                effects += self._send(out, [out.to_send.popleft() for _ in range(count)])
                effects += self._hand_over_if_sent(out, now)
                turns.append(out)
        return effects

    def expire(self, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        """Says again what is unanswered, gives up on what does not move."""
        effects: list[Effect] = []
        events: list[SenderEvent] = []
        if now < self._look_at:
            return effects, events
        for out in list(self._outgoing.values()):
            if now - out.progress >= self._timeout_s:
                said, failed = self._fail(out, "timeout", f"no progress for {self._timeout_s:g} s", now)
                effects += said
                events += failed
            elif now >= out.ask_at:
                effects += self._ask_again(out, now)
        effects += self._cancelling.expire(now)
        times = [min(out.ask_at, out.progress + self._timeout_s) for out in self._outgoing.values()]
        times += self._cancelling.deadlines()
        self._look_at = min(times, default=_NEVER)
        return effects, events

    def next_deadline(self) -> float | None:
        return None if self._look_at == _NEVER else self._look_at

    def _ask_by(self, out: Outgoing, time: float) -> None:
        out.ask_at = time
        self._look_by(time)

    def _look_by(self, time: float) -> None:
        """`expire` walks all transfers; deadlines mostly move away, so it is asked to only when one may have come."""
        self._look_at = min(self._look_at, time)

    # ------------------------------------------------------------ inside

    def _send(self, out: Outgoing, indices: list[int]) -> list[Effect]:
        if out.life.phase is TransferPhase.ACCEPTED:
            out.life.move(TransferPhase.SENDING)
        target, key = out.target, out.key
        self._in_flight.add(target.worker, key, indices)
        out.blocks_sent += len(indices)
        return [SendBlock(target, key, index, out.blocks[index]) for index in indices]

    def _hand_over_if_sent(self, out: Outgoing, now: float) -> list[Effect]:
        accepted = out.life.phase in (TransferPhase.ACCEPTED, TransferPhase.SENDING)
        if out.handover is None or out.to_send or not accepted:
            return []
        self._ask_by(out, now + self._retry_s)
        return [ToReceiver(out.target, out.handover)]

    def _ask_again(self, out: Outgoing, now: float) -> list[Effect]:
        self._ask_by(out, now + self._retry_s)
        if out.life.phase is TransferPhase.REVOKED or out.life.phase is TransferPhase.OFFERED:
            return self._offer_again(out, now)
        if now - out.answered >= 2 * self._retry_s:
            self._in_flight.forget(out.target.worker, out.key)
        return self._hand_over_if_sent(out, now)

    def _offer_again(self, out: Outgoing, now: float) -> list[Effect]:
        if out.life.phase is TransferPhase.REVOKED:
            out.life.move(TransferPhase.OFFERED)
        out.to_send.clear()
        out.nacks.clear()
        self._in_flight.forget(out.target.worker, out.key)
        self._ask_by(out, now + self._retry_s)
        return [ToReceiver(out.target, out.offer)]

    def peer_gone(self, worker: WorkerId, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        """Nobody is there any more: what is under way to it fails at once, so that it goes on elsewhere."""
        outs = [out for out in self._outgoing.values() if out.target.worker == worker]
        failed = [self._fail(out, "unreachable", f"{worker} cannot be reached", now) for out in outs]
        return [e for said, _ in failed for e in said], [event for _, events in failed for event in events]

    def _fail(
        self, out: Outgoing, cause: Cause, reason: str, now: float
    ) -> tuple[list[Effect], list[SenderEvent]]:
        out.life.move(TransferPhase.FAILED)
        self._outgoing.pop(out.key, None)
        return self._say_cancel(out, reason, now), [SendFailed(out.key, cause, reason)]

    def _say_cancel(self, out: Outgoing, reason: str, now: float) -> list[Effect]:
        self._in_flight.forget(out.target.worker, out.key)
        self._look_by(now + self._retry_s)
        return [self._cancelling.say(out.key, out.target, reason, now)]

    def _forget(self, out: Outgoing) -> None:
        self._in_flight.forget(out.target.worker, out.key)
        self._outgoing.pop(out.key, None)
