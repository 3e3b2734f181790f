"""One outgoing transfer, as the prefill worker that sends it knows it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
