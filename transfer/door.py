"""The door between two processes of one user on one machine, through which a sender shows its pool to a receiver.

    sender                                                      receiver
    connect to the socket that the peer's address names ──▶     accept; another user is turned away
    Segment or DevicePool: what finds the pool ──▶              the pool that it says? take it into view
                                                       ◀──      Mapped, or NotMapped(reason)
    … the connection stays, and stands for the view: whoever closes it or dies, the other hears at once and lets go

The socket is a Unix one with an abstract name: it leaves nothing behind, and it can only be reached on the same
kernel and network namespace, so "same machine" needs no comparing of names that might lie. Its other end's user is
told by the kernel (SO_PEERCRED).

What the memory is, and how it is shown and looked at, is the channel's affair (`shm.py`, `ipc.py`): the receiver reads
what the sender wrote, with no copy on the way.

Why a block may be read long after it was announced. The sender copies nothing, and its block must be what it was
until the receiver has copied it. What holds it:
  1. A transfer's blocks are held by its sequence until the transfer ends here: Delivered, cancelled, or failed.
     Until then nobody writes them: complete blocks are never written again, and the last one is sent only when the
     prompt is whole, after which this worker computes nothing for that sequence.
  2. Delivered means that the receiver has copied and checked every block it wanted. What it reads of them later (a
     frame that came twice) it drops without looking, for it misses none.
  3. After a cancellation or a failure the blocks are free at once and may be written while the receiver reads. Its
     copy is then half one thing and half another, and the checksum, which is of the block when it was announced,
     refuses it. If the copy passes, it is what was announced, whoever owns the block by now. So no order of events
     gives wrong bytes; and the receiver drops that transfer when the Cancel comes, or at its own limit.
  4. The checksum is of the receiver's copy and never of the block in view: that may change between a look and a copy.
So the hold is for progress, and the checksum for safety, as everywhere here: no timer guards any byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.counters import Counters
from common.errors import ProtocolViolation
from common.messages import (
    Block,
    ChannelName,
    Mapped,
    Message,
    NotMapped,
    PeerAddress,
    Sender,
    ShownPool,
)
from common.request import WorkerId
from common.wire import decode, encode
from transfer.channel import HUNG_UP, Arrived, BlocksIn, Frame, Outbound
from transfer.segment import CannotMap

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # under the time after which a silent way is made anew (links.py)
MAX_SENDERS = 256
_MESSAGE_BYTES = 4096

Hello = TypeVar("Hello", bound=ShownPool)


class Shown(Protocol):
    """A pool as its owner shows it."""

    def hello(self, target: PeerAddress) -> tuple[Message, Sequence[int]]:
        """What tells `target`, and nobody else, how to find it, and the descriptors that go with it."""
        ...

    def pack(self, blocks: Sequence[Outbound]) -> list[Block]: ...
    def close(self) -> None: ...


class View(Protocol):
    """Another process's pool, in view."""

    def of(self, headers: Sequence[Block]) -> AbstractContextManager[Sequence[Arrived]]:
        """The block that each names, and nothing for one that is not there."""
        ...

    def close(self) -> None: ...


class Viewer(Protocol[Hello]):
    """How pools of one kind are taken into view."""

    @property
    def hello(self) -> type[Hello]:
        """What says how one is found."""
        ...

    @property
    def num_fds(self) -> int:
        """How many descriptors go with it."""
        ...

    def view(self, message: Hello, fds: Sequence[int]) -> View:
        """Descriptors stay the caller's. Raises CannotMap."""
        ...


class DoorSending:
    """Towards every receiver one connection, which shows the pool once and then only says who lives."""

    def __init__(self, name: ChannelName, me: Sender, shown: Shown) -> None:
        self.name = name
        self._me = me
        self._shown = shown
        self._doors: dict[WorkerId, _Door] = {}

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        known = self._doors.get(target.worker)
        if known is not None and known.target == target and known.limit is None:
            known.opened, known.failed = opened, failed
            opened()
            return
        try:
            connection = _connect(target.channels[self.name])
        except OSError as error:
            failed(f"cannot reach it: {error.strerror or error}")
            return
        door = self._doors[target.worker] = _Door(target, connection, opened, failed)
        hello, fds = self._shown.hello(target)
        try:
            socket.send_fds(connection, [encode(hello, self._me)], fds)
        except OSError as error:
            self._lost(door, f"cannot hand the pool over: {error.strerror or error}")
            return
        loop = asyncio.get_running_loop()
        door.limit = loop.call_later(ANSWER_S, self._lost, door, f"no answer within {ANSWER_S:g} s")
        loop.add_reader(connection, self._heard, door)

    def _heard(self, door: _Door) -> None:
        try:
            data = door.connection.recv(_MESSAGE_BYTES)
            message = decode(data)[1] if data else None
        except BlockingIOError:
            return
        except (OSError, ProtocolViolation) as error:
            self._lost(door, str(error))
            return
        if isinstance(message, Mapped) and door.limit is not None:
            door.limit.cancel()
            door.limit = None
            door.opened()
        elif isinstance(message, NotMapped):
            self._lost(door, f"refused: {message.reason}")
        else:
            self._lost(
                door, HUNG_UP if message is None else f"a {type(message).__name__} instead of an answer"
            )

    def _lost(self, door: _Door, why: str) -> None:
        self.close(door.target)
        door.failed(why)

    def close(self, target: PeerAddress) -> None:
        door = self._doors.get(target.worker)
        if door is None or door.target != target:
            return
        del self._doors[target.worker]
        if door.limit is not None:
            door.limit.cancel()
        _hang_up(door.connection)

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        return [(header, b"") for header in self._shown.pack(blocks)]

    async def end(self) -> None:
        for door in list(self._doors.values()):
            self.close(door.target)
        self._shown.close()


@dataclass(slots=True, eq=False)
class _Door:
    """The connection to one receiver. `limit` runs while it has not answered."""

    target: PeerAddress
    connection: socket.socket
    opened: Callable[[], None]
    failed: Callable[[str], None]
    limit: asyncio.TimerHandle | None = None


class DoorReceiving(Generic[Hello]):
    """Takes pools of senders on this machine into view, one each, for as long as its connection stands."""

    def __init__(
        self, name: ChannelName, me: Sender, counters: Counters, block_bytes: int, viewer: Viewer[Hello]
    ) -> None:
        self.name = name
        self._me = me
        self._counters = counters
        self._block_bytes = block_bytes
        self._viewer = viewer
        self.where = f"kvferry-{me.incarnation}-{secrets.token_hex(8)}"
        self._listener = _unix_socket()
        self._listener.bind("\0" + self.where)
        self._listener.listen(MAX_SENDERS)
        self._guests: list[_Guest] = []
        self._in_view: dict[Sender, _Guest] = {}

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._knock)

    def take(self, sender: Sender, came: Sequence[Arrived], deliver: BlocksIn) -> None:
        guest = self._in_view.get(sender)
        headers = [header for header, _ in came]
        nothing: list[Arrived] = [(header, memoryview(b"")) for header in headers]
        view = None if guest is None else guest.view
        with nullcontext(nothing) if view is None else view.of(headers) as found:
            deliver(sender, found)

    async def end(self) -> None:
        for guest in list(self._guests):
            self._leave(guest)
        _hang_up(self._listener)

    # ------------------------------------------------------------ connections

    def _knock(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again, or we are out of descriptors: the sender's limit ends its wait
            return
        connection.setblocking(False)
        if len(self._guests) >= MAX_SENDERS or _user_of(connection) != os.geteuid():
            self._counters.add("protocol_violations_total")
            connection.close()
            return
        guest = _Guest(connection)
        self._guests.append(guest)
        loop = asyncio.get_running_loop()
        guest.limit = loop.call_later(ANSWER_S, self._leave, guest)
        loop.add_reader(connection, self._heard, guest)

    def _heard(self, guest: _Guest) -> None:
        """Its one message, or its end. Whatever descriptors come are closed here in any case."""
        try:
            data, fds, _, _ = socket.recv_fds(guest.connection, _MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        try:
            if not data:
                self._leave(guest)
            else:
                self._admit(guest, data, fds)
        except (CannotMap, ProtocolViolation) as error:
            self._counters.add("protocol_violations_total")
            log.warning("a pool offered over %s is not taken: %s", self.name, error)
            self._answer(guest, NotMapped(str(error)))
            self._leave(guest)
        finally:
            for fd in fds:
                os.close(fd)

    def _admit(self, guest: _Guest, data: bytes, fds: list[int]) -> None:
        """Raises CannotMap or ProtocolViolation."""
        sender, message = decode(data)
        hello, num_fds = self._viewer.hello, self._viewer.num_fds
        if not isinstance(message, hello) or len(fds) != num_fds or guest.sender is not None:
            raise ProtocolViolation(f"one {hello.__name__} with {num_fds} descriptors belongs here")
        if (message.worker, message.incarnation) != (self._me.name, self._me.incarnation):
            raise CannotMap(f"this is {self._me.name}, not {message.worker}, or another life of it")
        if message.block_bytes != self._block_bytes:
            raise CannotMap(f"blocks have {self._block_bytes} bytes here and {message.block_bytes} there")
        guest.view = self._viewer.view(message, fds)
        guest.sender = sender
        if guest.limit is not None:
            guest.limit.cancel()
            guest.limit = None
        if (before := self._in_view.get(sender)) is not None:
            self._leave(before)
        self._in_view[sender] = guest
        log.info(
            "KV from %s comes over %s: its pool of %d bytes is mapped", sender.name, self.name, message.size
        )
        self._answer(guest, Mapped())

    def _answer(self, guest: _Guest, message: Message) -> None:
        try:
            guest.connection.send(encode(message, self._me))
        except OSError:  # it has left: the next event on the connection says so
            log.debug("no answer could be given to a sender over %s", self.name)

    def _leave(self, guest: _Guest) -> None:
        if guest not in self._guests:
            return
        self._guests.remove(guest)
        if guest.limit is not None:
            guest.limit.cancel()
        if guest.sender is not None and self._in_view.get(guest.sender) is guest:
            del self._in_view[guest.sender]
        if guest.view is not None:
            guest.view.close()
        _hang_up(guest.connection)


@dataclass(slots=True, eq=False)
class _Guest:
    """One connection from a sender; `sender` and `view` once its pool is in view, `limit` until then."""

    connection: socket.socket
    sender: Sender | None = None
    view: View | None = None
    limit: asyncio.TimerHandle | None = None


# ---------------------------------------------------------------- Unix sockets


def _unix_socket() -> socket.socket:
    """Keeps messages apart, never blocks."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _connect(where: str) -> socket.socket:
    """Raises OSError, also when it is another user's: a pool is not shown to those."""
    connection = _unix_socket()
    try:
        connection.connect("\0" + where)
        if _user_of(connection) != os.geteuid():
            raise OSError("it belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _user_of(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel noted it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", data)[1]
    return user


def _hang_up(connection: socket.socket) -> None:
    """Safe where no loop runs any more."""
    try:
        asyncio.get_running_loop().remove_reader(connection)
    except RuntimeError:
        log.debug("no loop runs: nothing reads this socket")
    connection.close()
