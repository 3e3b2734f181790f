"""The sending side of KV transfers: what a prefill worker offers, ships and hands over. Pure.

    open ─ Offer ─▶ OFFERED ◀─ Later (offer again after a pause)
    Accept(wanted) ─▶ ACCEPTED ─ blocks as chunks finish, under the peer's byte window ─▶ SENDING
    prompt computed and all wanted blocks sent ─ Handover ─▶ (again every `retry_s` until) Delivered
    Revoke ─▶ REVOKED ─▶ OFFERED again, to the same or (Rebind) another worker; every block is still here
    Refused, Cancel from the peer, too many Nacks, no progress for `timeout_s` ─▶ FAILED

Any message may be lost, doubled, late or out of order. What the peer must know is said again until answered:
the offer, the hand-over, a cancellation. Bytes in flight are counted per peer as a set of frames, cleared by
Credit, Nack, Delivered and the end of a transfer, so a lost Credit cannot shrink the window for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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

MAX_NACKS = 2
CANCEL_TRIES = 3


@dataclass(frozen=True, slots=True)
class Sent:
    """The decode worker has verified every block and owns the request."""

    key: Key
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SendFailed:
    key: Key
    reason: str


SenderEvent = Sent | SendFailed


@dataclass(slots=True)
class _Outgoing:
    offer: Offer
    target: PeerAddress
    blocks: list[int]  # the sequence's pool blocks, by index
    opened: float
    progress: float  # last time the peer moved this on
    ask_at: float  # when to repeat the offer or the hand-over
    life: TransferLife = field(default_factory=TransferLife)
    computed: int = 0  # leading blocks whose KV is complete
    to_send: deque[int] = field(default_factory=deque)
    blocks_sent: int = 0
    nacks: dict[int, int] = field(default_factory=dict)
    handover: Handover | None = None

    @property
    def key(self) -> Key:
        return self.offer.key

    @property
    def sendable(self) -> bool:
        return bool(self.to_send) and self.to_send[0] < self.computed


@dataclass(slots=True)
class _Cancelling:
    target: PeerAddress
    message: Cancel
    ask_at: float
    tries: int


class TransferSender:
    def __init__(
        self,
        *,
        block_bytes: int,
        window_bytes: int = 8 << 20,
        retry_s: float = 1.0,
        timeout_s: float = 30.0,
    ) -> None:
        self._block_bytes = block_bytes
        self._window_frames = max(1, window_bytes // block_bytes)
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._outgoing: dict[Key, _Outgoing] = {}
        self._cancelling: dict[tuple[Key, WorkerId], _Cancelling] = {}
        self._in_flight: dict[WorkerId, dict[tuple[Key, int], None]] = {}

    def __len__(self) -> int:
        return len(self._outgoing)

    def __contains__(self, key: Key) -> bool:
        return key in self._outgoing

    @property
    def bytes_in_flight(self) -> int:
        return sum(map(len, self._in_flight.values())) * self._block_bytes

    # ------------------------------------------------------------ from the prefill worker

    def open(self, offer: Offer, target: PeerAddress, blocks: list[int], now: float) -> list[Effect]:
        """Starts a transfer; `blocks` are the pool blocks, all reserved, none computed yet."""
        assert offer.key not in self._outgoing
        out = _Outgoing(offer, target, blocks, opened=now, progress=now, ask_at=now + self._retry_s)
        self._outgoing[offer.key] = out
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
        out.progress = now
        self._cancelling.pop((key, target.worker), None)
        return effects + self._offer_again(out, now)

    def cancel(self, key: Key, reason: str, now: float) -> list[Effect]:
        """The request ended here. The peer is told until it answers; the blocks are free at once, because the
        engine copies what it sends. Idempotent."""
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
            self._cancelling.pop((message.key, sender), None)
            return [], []
        out = self._outgoing.get(message.key)
        if out is None or out.target.worker != sender:
            return [], []
        match message:
            case Accept():
                return self._accepted(out, message, now), []
            case Later():
                out.progress = now
                out.ask_at = now + message.retry_after_s
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
            case Refused() | Cancel():
                return self._fail(out, f"refused by {sender}: {message.reason}", now)
        return [], []

    def _accepted(self, out: _Outgoing, message: Accept, now: float) -> list[Effect]:
        if out.life.phase is not TransferPhase.OFFERED:
            return []  # an answer to a repeated offer
        out.life.move(TransferPhase.ACCEPTED)
        out.progress = now
        out.to_send = deque(index for index in message.wanted if index < len(out.blocks))
        return self._hand_over_if_sent(out, now)

    def _credited(self, out: _Outgoing, message: Credit, now: float) -> list[Effect]:
        out.progress = now
        flight = self._in_flight.get(out.target.worker, {})
        for index in message.indices:
            flight.pop((out.key, index), None)
        return []

    def _nacked(self, out: _Outgoing, message: Nack, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        if out.life.phase not in (TransferPhase.ACCEPTED, TransferPhase.SENDING):
            return [], []
        flight = self._in_flight.get(out.target.worker, {})
        for index in message.indices:
            flight.pop((out.key, index), None)
            out.nacks[index] = out.nacks.get(index, 0) + 1
            if out.nacks[index] > MAX_NACKS:
                return self._fail(out, f"block {index} did not arrive: {message.reason}", now)
            if index < len(out.blocks) and index not in out.to_send:
                out.to_send.append(index)
        out.to_send = deque(sorted(out.to_send))
        out.ask_at = now + self._retry_s
        return [], []

    def _delivered(self, out: _Outgoing, now: float) -> SenderEvent:
        if out.life.phase in (TransferPhase.OFFERED, TransferPhase.REVOKED):
            # The peer had it all the time and our view was behind (its Accept was lost).
            out.life = TransferLife(TransferPhase.ACCEPTED)
        out.life.move(TransferPhase.DELIVERED)
        self._forget(out)
        return Sent(out.key, out.blocks_sent, now - out.opened)

    def _revoked(self, out: _Outgoing, now: float) -> None:
        if out.life.phase is not TransferPhase.REVOKED:
            out.life.move(TransferPhase.REVOKED)
            self._clear_flight(out)
            out.ask_at = now + self._retry_s
            out.progress = now

    # ------------------------------------------------------------ on every turn of the loop

    def pump(self, now: float) -> list[Effect]:
        """Frames that may leave now: computed, wanted, inside each peer's window, transfers taking turns."""
        effects: list[Effect] = []
        moved = True
        while moved:
            moved = False
            for out in list(self._outgoing.values()):
                if not out.sendable:
                    continue
                flight = self._in_flight.setdefault(out.target.worker, {})
                if len(flight) >= self._window_frames:
                    continue
                effects.append(self._send_next(out, flight))
                effects += self._hand_over_if_sent(out, now)
                moved = True
        return effects

    def expire(self, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        """Says again what is unanswered, gives up on what does not move."""
        effects: list[Effect] = []
        events: list[SenderEvent] = []
        for out in list(self._outgoing.values()):
            if now - out.progress >= self._timeout_s:
                said, failed = self._fail(out, f"no progress for {self._timeout_s:g} s", now)
                effects += said
                events += failed
            elif now >= out.ask_at:
                effects += self._ask_again(out, now)
        for cancelling in list(self._cancelling.values()):
            if now >= cancelling.ask_at:
                effects += self._cancel_again(cancelling, now)
        return effects, events

    def next_deadline(self) -> float | None:
        times = [min(out.ask_at, out.progress + self._timeout_s) for out in self._outgoing.values()]
        times += [cancelling.ask_at for cancelling in self._cancelling.values()]
        return min(times, default=None)

    # ------------------------------------------------------------ inside

    def _send_next(self, out: _Outgoing, flight: dict[tuple[Key, int], None]) -> Effect:
        if out.life.phase is TransferPhase.ACCEPTED:
            out.life.move(TransferPhase.SENDING)
        index = out.to_send.popleft()
        flight[(out.key, index)] = None
        out.blocks_sent += 1
        return SendBlock(out.target, out.key, index, out.blocks[index])

    def _hand_over_if_sent(self, out: _Outgoing, now: float) -> list[Effect]:
        accepted = out.life.phase in (TransferPhase.ACCEPTED, TransferPhase.SENDING)
        if out.handover is None or out.to_send or not accepted:
            return []
        out.ask_at = now + self._retry_s
        return [ToReceiver(out.target, out.handover)]

    def _ask_again(self, out: _Outgoing, now: float) -> list[Effect]:
        out.ask_at = now + self._retry_s
        if out.life.phase is TransferPhase.REVOKED or out.life.phase is TransferPhase.OFFERED:
            return self._offer_again(out, now)
        if now - out.progress >= 2 * self._retry_s:
            self._send_lost_frames_again(out)
        return self._hand_over_if_sent(out, now)

    def _send_lost_frames_again(self, out: _Outgoing) -> None:
        """Frames without an answer for so long are taken as lost; the peer ignores those it has."""
        flight = self._in_flight.get(out.target.worker, {})
        lost = [index for key, index in flight if key == out.key]
        self._clear_flight(out)
        out.to_send = deque(sorted({*out.to_send, *lost}))

    def _offer_again(self, out: _Outgoing, now: float) -> list[Effect]:
        if out.life.phase is TransferPhase.REVOKED:
            out.life.move(TransferPhase.OFFERED)
        out.to_send.clear()
        out.nacks.clear()
        self._clear_flight(out)
        out.ask_at = now + self._retry_s
        return [ToReceiver(out.target, out.offer)]

    def _fail(self, out: _Outgoing, reason: str, now: float) -> tuple[list[Effect], list[SenderEvent]]:
        out.life.move(TransferPhase.FAILED)
        self._outgoing.pop(out.key, None)
        return self._say_cancel(out, reason, now), [SendFailed(out.key, reason)]

    def _say_cancel(self, out: _Outgoing, reason: str, now: float) -> list[Effect]:
        self._clear_flight(out)
        message = Cancel(*out.key, reason)
        self._cancelling[(out.key, out.target.worker)] = _Cancelling(out.target, message, now + self._retry_s, tries=1)
        return [ToReceiver(out.target, message)]

    def _cancel_again(self, cancelling: _Cancelling, now: float) -> list[Effect]:
        if cancelling.tries >= CANCEL_TRIES:
            # The receiver's own deadline is the backstop.
            del self._cancelling[(cancelling.message.key, cancelling.target.worker)]
            return []
        cancelling.tries += 1
        cancelling.ask_at = now + self._retry_s
        return [ToReceiver(cancelling.target, cancelling.message)]

    def _forget(self, out: _Outgoing) -> None:
        self._clear_flight(out)
        self._outgoing.pop(out.key, None)

    def _clear_flight(self, out: _Outgoing) -> None:
        flight = self._in_flight.get(out.target.worker)
        if flight is None:
            return
        for frame in [frame for frame in flight if frame[0] == out.key]:
            del flight[frame]
        if not flight:
            del self._in_flight[out.target.worker]
