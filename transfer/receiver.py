"""The receiving side of KV transfers: what a decode worker has accepted and is still waiting for. Pure.

    Offer ─▶ (the decode worker reserves) accept ─▶ ACCEPTED ─ Accept(wanted) ─▶
    Block, copied by the engine into the reserved block and checked ─▶ SENDING ─ Credit ─▶
    Handover and nothing missing ─▶ DELIVERED: `Ready` tells the decode worker, which answers Delivered
    Cancel, no frame for `timeout_s`, revoke ─▶ CANCELLED or REVOKED: `Lost`, blocks go back

The limit here is longer than the sender's, so the sender gives up first and its retry meets a clean table. A
frame for anything but a live transfer from its own sender is consumed, credited and dropped: a late writer
cannot touch a block, because only this worker writes its pool.

Why no deadlock: a transfer is accepted with all of its blocks or not at all, so none fills this pool part-way and then
waits for another to leave it; and what it waits for, its prompt's computing, waits for nothing here. Consumed frames
are credited whatever else this worker has to do. The whole picture: `common/lifecycle.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.effects import Effect, ToSender
from common.lifecycle import TransferLife, TransferPhase
from common.messages import Accept, Block, Credit, Handover, Nack, Revoke
from common.request import Key, WorkerId
from transfer.in_flight import WINDOW_BYTES

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Ready:
    """Every block is verified and in place, and the first token is known."""

    key: Key
    handover: Handover
    blocks: int  # verified frames that came for it


@dataclass(slots=True)
class _Incoming:
    key: Key
    sender: WorkerId
    blocks: list[int]  # reserved pool blocks, by index; the first `len(hits)` were here already
    wanted: tuple[int, ...]
    missing: set[int]
    progress: float
    ask_at: float
    life: TransferLife = field(default_factory=lambda: TransferLife(TransferPhase.ACCEPTED))
    handover: Handover | None = None


class TransferReceiver:
    def __init__(
        self,
        *,
        block_bytes: int,
        window_bytes: int = WINDOW_BYTES,
        retry_s: float = 1.0,
        timeout_s: float = 45.0,
    ) -> None:
        self._block_bytes = block_bytes
        self._window_bytes = window_bytes
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._incoming: dict[Key, _Incoming] = {}
        self._whole: dict[Key, None] = {}  # handed over and nothing missing, not yet taken by `ready`
        self._look_at = _NEVER  # no deadline of any transfer lies before this
        self._credits: dict[tuple[Key, WorkerId], list[int]] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    @property
    def settled(self) -> bool:
        """Nothing is under way or waits to be said."""
        return not (self._incoming or self._whole or self._credits)

    def __contains__(self, key: Key) -> bool:
        return key in self._incoming

    def accept(
        self, key: Key, sender: WorkerId, blocks: list[int], hits: int, num_blocks: int, now: float
    ) -> list[Effect]:
        """Takes up a transfer of `num_blocks` blocks into the reserved `blocks`, the first `hits` of them not
        wanted because their content is here."""
        assert key not in self._incoming and hits <= num_blocks <= len(blocks)
        wanted = tuple(range(hits, num_blocks))
        self._incoming[key] = _Incoming(
            key, sender, blocks, wanted, set(wanted), progress=now, ask_at=now + self._retry_s
        )
        self._look_by(now + self._timeout_s)
        return self.answer_again(key)

    def answer_again(self, key: Key) -> list[Effect]:
        """The same answer to a repeated offer."""
        incoming = self._incoming[key]
        return [ToSender(incoming.sender, Accept(*key, incoming.wanted, self._window_bytes))]

    def from_same_sender(self, key: Key, sender: WorkerId) -> bool:
        return self._incoming[key].sender == sender

    def place(self, header: Block, sender: WorkerId) -> int | None:
        """The reserved pool block that this one is missing in; None where nobody waits for it."""
        incoming = self._incoming.get(header.key)
        if incoming is None or incoming.sender != sender or header.index not in incoming.missing:
            return None
        return incoming.blocks[header.index] if header.part == 0 else None

    def block(self, header: Block, sender: WorkerId, good: bool, now: float) -> int | None:
        """A block came; `good` says that size and checksum are right. Returns the pool block that is filled by it,
        None where it comes to nothing. Its credit goes out with the next `flush`."""
        self._credits.setdefault((header.key, sender), []).append(header.index)
        place = self.place(header, sender)
        if place is None:
            return None
        incoming = self._incoming[header.key]
        incoming.progress = now
        if incoming.life.phase is TransferPhase.ACCEPTED:
            incoming.life.move(TransferPhase.SENDING)
        if not good:
            return None
        incoming.missing.discard(header.index)
        self._note_if_whole(incoming)
        return place

    def nack(self, header: Block, sender: WorkerId, reason: str) -> list[Effect]:
        """Asks for a frame again that was not good."""
        incoming = self._incoming.get(header.key)
        if incoming is None or incoming.sender != sender or header.index not in incoming.missing:
            return []
        return [ToSender(sender, Nack(*header.key, (header.index,), reason))]

    def handed_over(self, message: Handover, now: float) -> list[Effect]:
        """The sender says it has sent all. Missing blocks may still be on their way (another socket): they are
        asked for once nothing came for `retry_s`."""
        incoming = self._incoming[message.key]
        if incoming.handover is None:  # a repetition must not put off the asking
            incoming.handover = message
            incoming.ask_at = now + self._retry_s
            self._look_by(incoming.ask_at)
            self._note_if_whole(incoming)
        return []

    def _note_if_whole(self, incoming: _Incoming) -> None:
        if incoming.handover is not None and not incoming.missing:
            self._whole[incoming.key] = None

    def ready(self) -> list[Ready]:
        """Transfers that have become whole; they leave this table."""
        if not self._whole:
            return []
        events = []
        for key in self._whole:
            incoming = self._take(key)
            assert incoming is not None
            assert incoming.handover is not None
            incoming.life.move(TransferPhase.DELIVERED)
            events.append(Ready(key, incoming.handover, len(incoming.wanted)))
        self._whole = {}
        return events

    def nearly_whole(self, blocks: int) -> list[Key]:
        """Transfers that miss so many at most."""
        return [key for key, incoming in self._incoming.items() if len(incoming.missing) <= blocks]

    def drop(self, key: Key) -> bool:
        """Forgets a transfer (cancelled, or its request ended). The caller frees the blocks."""
        self._whole.pop(key, None)
        incoming = self._take(key)
        if incoming is None:
            return False
        incoming.life.move(TransferPhase.CANCELLED)
        return True

    def revoke(self, key: Key, reason: str) -> list[Effect]:
        """Gives the reservation up; the sender still has every block and may offer again."""
        self._whole.pop(key, None)
        incoming = self._take(key)
        assert incoming is not None
        incoming.life.move(TransferPhase.REVOKED)
        return [ToSender(incoming.sender, Revoke(*key, reason))]

    def _take(self, key: Key) -> _Incoming | None:
        """It leaves this table, and the sender is about to hear so, or has said so: what it has in flight no longer
        counts, and a Credit for that would come late."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._credits.pop((key, incoming.sender), None)
        return incoming

    def flush(self) -> list[Effect]:
        """One Credit per transfer for the frames consumed since the last call."""
        if not self._credits:
            return []
        credits, self._credits = self._credits, {}
        return [ToSender(sender, Credit(*key, tuple(indices))) for (key, sender), indices in credits.items()]

    def expire(self, now: float) -> tuple[list[Effect], list[Key]]:
        """Asks for lost frames; returns the transfers given up (already told to the sender)."""
        effects: list[Effect] = []
        lost: list[Key] = []
        if now < self._look_at:
            return effects, lost
        for incoming in list(self._incoming.values()):
            if now - incoming.progress >= self._timeout_s:
                effects += self.revoke(incoming.key, f"no frame for {self._timeout_s:g} s")
                lost.append(incoming.key)
            elif now >= incoming.ask_at and incoming.handover is not None:
                incoming.ask_at = now + self._retry_s
                if incoming.missing and now - incoming.progress >= self._retry_s:
                    missing = tuple(sorted(incoming.missing))
                    effects.append(ToSender(incoming.sender, Nack(*incoming.key, missing, "did not arrive")))
        times = [i.progress + self._timeout_s for i in self._incoming.values()]
        times += [i.ask_at for i in self._incoming.values() if i.handover is not None]
        self._look_at = min(times, default=_NEVER)
        return effects, lost

    def next_deadline(self) -> float | None:
        return None if self._look_at == _NEVER else self._look_at

    def _look_by(self, time: float) -> None:
        """`expire` walks all transfers; deadlines mostly move away, so it is asked to only when one may have come."""
        self._look_at = min(self._look_at, time)
