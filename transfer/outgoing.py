"""One outgoing transfer, as the prefill worker that sends it knows it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from common.effects import BLOCKS_AT_ONCE
from common.lifecycle import TransferLife
from common.messages import Handover, Offer, PeerAddress
from common.request import Key


@dataclass(slots=True)
class Outgoing:
    """Of the transfer `offer.key`; `blocks` are the sequence's pool blocks, by index."""

    offer: Offer
    target: PeerAddress
    blocks: list[int]
    opened: float
    bound: float  # since when it asks this peer for room
    progress: float  # last time it moved on, here or there
    answered: float  # last time the peer said something about it
    ask_at: float  # when to repeat the offer or the hand-over
    window_frames: int  # what the peer takes in flight, at most ours
    life: TransferLife = field(default_factory=TransferLife)
    computed: int = 0  # leading blocks whose KV is complete
    to_send: deque[int] = field(default_factory=deque)  # wanted, or asked for again, in order
    blocks_sent: int = 0
    nacks: dict[int, int] = field(default_factory=dict)
    handover: Handover | None = None

    @property
    def key(self) -> Key:
        return self.offer.key

    @property
    def sendable(self) -> bool:
        return bool(self.to_send) and self.to_send[0] < self.computed

    def next_message(self, room: int) -> int:
        """How many blocks go into a window with room for so many: what is ready, if it fits or the room is worth it.

        Else each block's Credit would let just one block go, and no two would ever share a message again. A quarter of
        the window comes back even when the Credit of a message is lost."""
        if room <= 0:  # as most often is said of a window that is in use
            return 0
        ready = sum(index < self.computed for index in islice(self.to_send, BLOCKS_AT_ONCE))
        return min(ready, room) if room >= min(ready, BLOCKS_AT_ONCE, max(1, self.window_frames // 4)) else 0
