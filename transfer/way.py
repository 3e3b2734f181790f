"""The way to one life of one decode worker: two sockets, and the channel that blocks take.

    choosing ─ the first channel of ours that it takes and that opens ─▶ open
    open ─ the channel is lost ─▶ lost ─ something is to be sent ─▶ choosing among those behind it
    choosing, none is left ─▶ shut: an offer is refused in the peer's name, so the request goes on elsewhere at once

What is said while choosing waits for the choice (each channel has a limit for it), so that the first block of the
first transfer takes the same channel as all that follow. A channel that was lost or did not open is not tried again
on this way; a new one is made for another life of the peer, for a silent one, and for an offer to a shut one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from common.counters import Counters
from common.effects import BLOCKS_AT_ONCE
from common.messages import Block, Message, Offer, PeerAddress, Sender
from transfer.channel import HUNG_UP, Outbound, SendingEnd
from transfer.data_messages import frames_of
from transfer.inbox import send, send_frames
from transfer.presence import Presence

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # messages; what is over it is said again by its deadline


class Way:
    """`unanswered_since`: when the oldest message was said that has no answer after it."""

    def __init__(
        self,
        me: Sender,
        counters: Counters,
        address: PeerAddress,
        control: zmq.asyncio.Socket,
        data: zmq.asyncio.Socket,
        presence: Presence,
        reader: asyncio.Task[None],
        refuse: Callable[[Offer, str], None],
    ) -> None:
        self._me = me
        self._counters = counters
        self.address = address
        self._control = control
        self._data = data
        self._presence = presence
        self._reader = reader
        self._refuse = refuse
        self.unanswered_since: float | None = None
        self.shut = ""  # why no channel is left
        self._left: list[SendingEnd] = []
        self._end: SendingEnd | None = None  # the one that is open or opening
        self._is_open = False
        self._lost = ""  # why the channel that was open is not
        self._waiting: list[Message] = []

    @property
    def channel(self) -> str:
        """Name of the channel that is open, "" where none is."""
        return self._end.name if self._end is not None and self._is_open else ""

    def choose(self, ends: Sequence[SendingEnd]) -> None:
        """Tries `ends` in their order. To be called once."""
        self._left = [end for end in ends if end.name in self.address.channels]
        self._next(f"it takes {' or '.join(self.address.channels)}, we send over {_names(ends)}")

    def say(self, message: Message) -> None:
        self._choose_again_if_lost()
        if self.channel:
            self._send(message)
        elif self.shut and isinstance(message, Offer):
            self._refuse(message, self.shut)
        elif self.shut:
            self._send(message)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
        else:
            self._unsent(message)

    def send_blocks(self, blocks: Sequence[Outbound]) -> None:
        """Ships pool blocks by the channel that is open. Where none is, they count as lost: they will be asked for."""
        self._choose_again_if_lost()
        at_once = min(BLOCKS_AT_ONCE, self.address.blocks_at_once)
        for first in range(0, len(blocks), at_once):
            some = blocks[first : first + at_once]
            if self._end is None or not self._is_open:
                self._counters.add("unsent_messages_total", float(len(some)), kind=Block.__name__)
                continue
            packed = self._end.pack(self.address, some)
            frames = frames_of(packed, self._me, one_header=self.address.one_header)
            if not send_frames(self._data, frames):
                self._counters.add("unsent_messages_total", float(len(some)), kind=Block.__name__)

    def close(self, *, keep_channel: bool = False, linger_ms: int = 0) -> None:
        """With `keep_channel` the channel stands open for the next way to the same life of the peer."""
        if self._end is not None and not (keep_channel and self._is_open):
            self._end.close(self.address)
        self._end, self._left, self._is_open = None, [], False
        self._reader.cancel()
        self._presence.end()
        linger_ms = linger_ms if self._presence.there else 0
        self._control.close(linger=linger_ms)
        self._data.close(linger=linger_ms)

    # ------------------------------------------------------------ choosing

    def _next(self, why: str) -> None:
        if self._left:
            end = self._end = self._left.pop(0)
            end.open(self.address, lambda: self._opened(end), lambda fault: self._failed(end, fault))
            return
        self._end, self.shut = None, why
        log.warning("no KV can go to %s: %s", self.address.worker, why)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            if isinstance(message, Offer):
                self._refuse(message, why)
            else:
                self._send(message)

    def _opened(self, end: SendingEnd) -> None:
        self._is_open = True
        log.info("KV to %s goes over %s", self.address.worker, end.name)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._send(message)

    def _failed(self, end: SendingEnd, why: str) -> None:
        self._counters.add("kv_channel_failures_total", channel=end.name)
        how = "is lost" if self._is_open else "cannot be had"
        level = logging.INFO if self._is_open and why == HUNG_UP else logging.WARNING
        log.log(level, "%s to %s %s: %s", end.name, self.address.worker, how, why)
        if self._is_open:  # most often its process ended, and nothing will ever be sent there again
            self._end, self._is_open, self._lost = None, False, f"{end.name} was lost: {why}"
        else:
            self._next(f"{end.name}: {why}")

    def _choose_again_if_lost(self) -> None:
        if self._lost:
            why, self._lost = self._lost, ""
            self._next(why)

    def _send(self, message: Message) -> None:
        send(self._control, (), message, self._me, self._counters)

    def _unsent(self, message: Message) -> None:
        self._counters.add("unsent_messages_total", kind=type(message).__name__)


def _names(ends: Sequence[SendingEnd]) -> str:
    return " or ".join(end.name for end in ends) or "nothing"
