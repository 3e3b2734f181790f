"""Where a sender and a receiver meet to make a process group: one TCP connection, which is the group's store too.

    sender                                             receiver
    connect to the port that the peer's address names ──▶   accept
    Join ──▶                                                is it for this life, with blocks as large as ours?
                                            Published ◀─▶   what torch asks of a store, until the group stands
                                                       ◀──  Joined, or at any time before NotJoined(reason)
    … the connection stays, and stands for the group: whoever closes it or dies, the other hears at once and lets go

Why a store of our own and not torch's TCPStore: its client waits for the server's first word whatever its timeout says
(torch 2.13: 90 s and more where 1 s was asked), so that a peer that is stopped in that moment would hold a thread
for as long as it is; its server serves anybody; and each pair would have two more threads and seven more
descriptors. All that a group of two needs is that each can read what the other has published.

Every wait here ends at the deadline that was given in the beginning. Nothing is encrypted, and nobody proves who he is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # theirs to say, and they do not

from common.errors import ProtocolViolation
from common.group_messages import Joined, NotJoined, Published
from common.messages import Message, Sender
from common.wire import decode, encode

_LENGTH_BYTES = 4
_LONGEST_BYTES = 8192
_BACKLOG = 64
_LEAST_S = 0.001  # a socket takes 0 for "never wait"
_MOST_KEYS = 64  # gloo publishes one for each process, NCCL one
_MAPPED = "::ffff:"  # an IPv4 address as a socket for both kinds names it


class CannotJoin(Exception):
    """There will be no group; the message says why."""


class Connection:
    """To one peer. For one thread at a time. `deadline`: of all waits together, on `time.monotonic`."""

    def __init__(self, connected: socket.socket, me: Sender, deadline: float) -> None:
        self._socket = connected
        self._me = me
        self._deadline = deadline
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def left_s(self) -> float:
        return max(_LEAST_S, self._deadline - time.monotonic())

    @property
    def own_host(self) -> str:
        """The address of this machine that leads to the peer."""
        host: str = self._socket.getsockname()[0]
        return host.removeprefix(_MAPPED)

    def say(self, message: Message) -> None:
        """Raises CannotJoin."""
        data = encode(message, self._me)
        try:
            self._socket.settimeout(self.left_s)
            self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        except OSError as error:
            raise CannotJoin(_in_words(error)) from None

    def hear(self) -> tuple[Sender, Message]:
        """The next message. Raises CannotJoin, also with the peer's own reason, and ProtocolViolation."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > _LONGEST_BYTES:
            raise ProtocolViolation(f"a message of {length} bytes where {_LONGEST_BYTES} are the most")
        sender, message = decode(self._read(length))
        if isinstance(message, NotJoined):
            raise CannotJoin(f"refused: {message.reason}")
        return sender, message

    def hear_joined(self) -> None:
        """Raises CannotJoin and ProtocolViolation."""
        _, message = self.hear()
        if not isinstance(message, Joined):
            raise ProtocolViolation(f"a {type(message).__name__} instead of an answer")

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            if time.monotonic() >= self._deadline:  # one byte now and then is no answer either
                raise CannotJoin("no answer in time")
            try:
                self._socket.settimeout(self.left_s)
                more = self._socket.recv(count - len(found))
            except OSError as error:
                raise CannotJoin(_in_words(error)) from None
            if not more:
                raise CannotJoin("it hung up")
            found += more
        return found

    def watched(self) -> socket.socket:
        """A second descriptor of it, to hear of its end and to end it by; the caller's to close."""
        return self._socket.dup()

    def close(self) -> None:
        self._socket.close()


def connect(host: str, port: int, me: Sender, deadline: float) -> Connection:
    """Raises CannotJoin."""
    try:
        connected = socket.create_connection((host, port), max(_LEAST_S, deadline - time.monotonic()))
    except OSError as error:
        raise CannotJoin(f"cannot reach it: {_in_words(error)}") from None
    return Connection(connected, me, deadline)


def listen(host: str) -> socket.socket:
    """On any free port of `host`, "" for every address; never blocks. Raises OSError."""
    if not host and socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    else:
        family, _, _, _, where = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    listener.setblocking(False)
    return listener


def hang_up(watched: socket.socket) -> None:
    """The connection itself ends, whoever else has a descriptor of it."""
    with suppress(OSError):  # it has ended already
        watched.shutdown(socket.SHUT_RDWR)
    watched.close()


class PairStore(Store):
    """What torch asks of a store while a group is made: either end publishes its own keys and reads the other's.

    Called from torch's C++ code. What an error here was about does not survive that way: it stands in `fault`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}
        self.fault = ""
        self.readable: Callable[[bytes], bool] = lambda value: True
        """Whether a peer's value may be shown to torch."""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's C++ gives bytes
        self._known[key] = bytes(value)
        self._say(Published(key, bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are known; the connection's deadline is the limit, whatever torch's own would be."""
        while not self.check(keys):
            try:
                _, message = self._connection.hear()
                if not isinstance(message, Published) or len(self._known) >= _MOST_KEYS:
                    raise ProtocolViolation(
                        f"a {type(message).__name__} where {_MOST_KEYS} keys of a group belong"
                    )
                if not self.readable(message.value):
                    raise ProtocolViolation("it publishes what is no address of a group")
            except (CannotJoin, ProtocolViolation) as error:
                self.fault = str(error)
                raise
            self._known[message.key] = message.value

    def _say(self, message: Message) -> None:
        try:
            self._connection.say(message)
        except CannotJoin as error:
            self.fault = str(error)
            raise


def _in_words(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error.strerror or error)
