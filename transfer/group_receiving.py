"""The receiving end of `gloo` and `nccl`: a port where senders join, and for each a thread that receives its blocks.

A header says that a block is on its way in its sender's group, and which; the thread receives as many as are announced,
into staging of its own, and the loop hands them over from there. A block whose header got lost on the data socket
is received and dropped when a later one's header comes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from common.counters import Counters
from common.effects import BLOCKS_AT_ONCE
from common.errors import ProtocolViolation
from common.group_messages import Join, Joined, NotJoined
from common.messages import Block, ChannelName, Sender
from transfer.channel import Arrived, BlocksIn
from transfer.group_sending import MakeGroup, make_group
from transfer.pair_thread import OPEN_S, PairThread, all_over
from transfer.process_group import RECEIVER
from transfer.rendezvous import CannotJoin, Connection, listen

log = logging.getLogger(__name__)

MAX_SENDERS = 256
_BUFFERS = 2  # one is filled while the loop empties the other
_MAX_SKIPPED = 1024  # blocks without a header; a number that lies further ahead is none of this group
_MAX_WAITING = 65_536  # blocks announced and not here; more than any window has
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class _Coming:
    """Blocks in the order of their group; None for one without a header."""

    headers: Sequence[Block | None]
    deliver: BlocksIn


class GroupReceiving:
    def __init__(
        self,
        name: ChannelName,
        me: Sender,
        counters: Counters,
        block_bytes: int,
        host: str,
        make: MakeGroup,
    ) -> None:
        """`host`: where it listens, "" for every address. Raises OSError."""
        self.name: ChannelName = name
        self._me = me
        self._counters = counters
        self._block_bytes = block_bytes
        self._make = make
        self._listener = listen(host)
        self.where = str(self._listener.getsockname()[1])
        self._guests: list[_Guest] = []
        self._joined: dict[Sender, _Guest] = {}
        self._threads: list[PairThread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._knock)

    def take(self, sender: Sender, came: Sequence[Arrived], deliver: BlocksIn) -> None:
        guest = self._joined.get(sender)
        headers = [header for header, _ in came]
        coming = guest.expected(headers, self._block_bytes) if guest is not None else []
        strange = [header for header in headers if header not in coming]
        if strange:
            deliver(sender, [(header, _NOTHING) for header in strange])
        if guest is None or not coming:
            return
        for first in range(0, len(coming), BLOCKS_AT_ONCE):
            guest.coming.put(_Coming(coming[first : first + BLOCKS_AT_ONCE], deliver))
        guest.waiting += len(coming)
        if guest.waiting > _MAX_WAITING:
            self._lost(guest, "it announces more than it sends")

    async def end(self) -> None:
        for guest in list(self._guests):
            self._leave(guest)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._listener)
        self._listener.close()
        await all_over(self._threads)

    # ------------------------------------------------------------ on the loop

    def _knock(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has left again, or we are out of descriptors: the sender's limit ends its wait
            return
        if len(self._guests) >= MAX_SENDERS:
            self._counters.add("protocol_violations_total")
            connected.close()
            return
        guest = _Guest()
        guest.thread = PairThread(
            f"{self.name} from a sender",
            lambda: self._serve(guest, connected),
            lambda why: self._lost(guest, why),
        )
        self._guests.append(guest)
        self._threads = [*(thread for thread in self._threads if not thread.is_over), guest.thread]
        guest.thread.start()

    def _admit(self, guest: _Guest, sender: Sender, first: int, connection: Connection) -> None:
        """The group stands. Headers may come from now on, so it is known here before the sender hears of it."""
        if guest.thread.closed:
            return
        if (before := self._joined.get(sender)) is not None:
            self._leave(before)
        guest.sender, guest.next = sender, first
        self._joined[sender] = guest
        guest.thread.watch(connection.watched())
        log.info("KV from %s comes over %s", sender.name, self.name)
        try:
            connection.say(Joined())  # a few bytes, the first into this socket for long: it has room for them
        except CannotJoin as error:
            self._lost(guest, str(error))

    def _landed(self, guest: _Guest, coming: _Coming, buffer: torch.Tensor) -> None:
        guest.waiting -= len(coming.headers)
        if guest.thread.closed or guest.sender is None:
            return
        rows = buffer.numpy()
        came = [
            (header, memoryview(row))
            for header, row in zip(coming.headers, rows, strict=False)
            if header is not None
        ]
        try:
            coming.deliver(guest.sender, came)
        except Exception:  # ours: nobody else is there to whom it could go
            self._counters.add("internal_errors_total")
            log.exception("blocks could not be handled")
        finally:
            guest.buffers.put(buffer)

    def _lost(self, guest: _Guest, why: str) -> None:
        who = "a sender" if guest.sender is None else guest.sender.name
        log.info("%s from %s ends: %s", self.name, who, why)
        self._leave(guest)

    def _leave(self, guest: _Guest) -> None:
        if guest.thread.closed:
            return
        self._guests.remove(guest)
        if guest.sender is not None and self._joined.get(guest.sender) is guest:
            del self._joined[guest.sender]
        guest.close()

    # ------------------------------------------------------------ in the pair's thread

    def _serve(self, guest: _Guest, connected: socket.socket) -> None:
        """Raises what the group is lost by."""
        connection = Connection(connected, self._me, time.monotonic() + OPEN_S)
        try:
            sender, join = self._asked(guest, connection)
            group = make_group(self._make, connection, RECEIVER)
            try:
                for _ in range(_BUFFERS):
                    guest.buffers.put(group.buffer(BLOCKS_AT_ONCE, self._block_bytes))
                guest.thread.tell(self._admit, guest, sender, join.first, connection)
                while (coming := guest.coming.get()) is not None:
                    if (buffer := guest.buffers.get()) is None:
                        return
                    group.receive(buffer[: len(coming.headers)], lambda: guest.thread.closed)
                    guest.thread.tell(self._landed, guest, coming, buffer)
            finally:
                group.end()
        finally:
            connection.close()

    def _asked(self, guest: _Guest, connection: Connection) -> tuple[Sender, Join]:
        """Raises CannotJoin and ProtocolViolation; whoever asked has then heard why."""
        try:
            sender, message = connection.hear()
            if not isinstance(message, Join):
                raise ProtocolViolation(f"a {type(message).__name__} where a Join belongs")
            if (message.worker, message.incarnation) != (self._me.name, self._me.incarnation):
                raise ProtocolViolation(
                    f"this is {self._me.name}, not {message.worker}, or another life of it"
                )
            if message.block_bytes != self._block_bytes:
                raise ProtocolViolation(
                    f"blocks have {self._block_bytes} bytes here and {message.block_bytes} there"
                )
        except ProtocolViolation as error:
            guest.thread.tell(self._counters.add, "protocol_violations_total")
            connection.say(NotJoined(error.message))
            raise
        return sender, message


class _Guest:
    """One connection from a sender; `sender` and `next`, the number of its next block, once the group stands.

    `coming` and `buffers` are what the thread waits for; None: leave. `waiting`: blocks announced and not here."""

    thread: PairThread

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.next = 0
        self.waiting = 0
        self.coming: SimpleQueue[_Coming | None] = SimpleQueue()
        self.buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()

    def expected(self, headers: Sequence[Block], block_bytes: int) -> list[Block | None]:
        """What is to be received now: blocks of `headers`, and those before them that no header came for."""
        coming: list[Block | None] = []
        for header in headers:
            skipped = header.offset - self.next
            if header.size == block_bytes and 0 <= skipped <= _MAX_SKIPPED:
                coming += [*[None] * skipped, header]
                self.next = header.offset + 1
        return coming

    def close(self) -> None:
        self.thread.close()
        self.coming.put(None)
        self.buffers.put(None)
