"""Reads what comes from a socket: checked messages only, garbage counted and its sender shut out after a while.

Also the one place where our sockets get their options, so that every one has bounds and none waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import cast

import zmq
import zmq.asyncio

from common.counters import Counters
from common.errors import ProtocolViolation
from common.messages import Message, Sender, decode, encode

log = logging.getLogger(__name__)

LINGER_MS = 1000
HIGH_WATER_MESSAGES = 100_000
MAX_VIOLATIONS = 100
MAX_ROUTES = 10_000


def make_socket(context: zmq.asyncio.Context, kind: int, max_bytes: int) -> zmq.asyncio.Socket:
    """A socket that neither keeps a process from leaving nor takes a message longer than `max_bytes`."""
    socket: zmq.asyncio.Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def identity(sender: Sender) -> bytes:
    """A ROUTER knows its peers by this: a restarted worker is a new peer, never a twin of its old pipe."""
    return f"{sender.name}/{sender.incarnation}".encode()


def send(
    socket: zmq.asyncio.Socket, frames: Sequence[bytes], message: Message, me: Sender, counters: Counters
) -> None:
    """Sends `frames`, or `frames` and the encoded message when it is not among them; never waits. What the socket
    does not take is dropped and counted: the protocol says it again."""
    # pyzmq's send tries at once and gives a future that is done either way.
    sent = cast(
        "asyncio.Future[object]",
        socket.send_multipart([*frames, encode(message, me)], flags=zmq.NOBLOCK, copy=True),
    )
    if sent.done() and sent.exception() is not None:
        counters.add("unsent_messages_total", kind=type(message).__name__)


class Inbox:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._violations: dict[bytes, int] = {}

    def read(self, data: bytes | memoryview, route: bytes = b"") -> tuple[Sender, Message] | None:
        """The checked message, or None. `route` is the identity it came from, where the socket knows one: it must
        be the sender's own, and is no longer listened to after MAX_VIOLATIONS."""
        if self._violations.get(route, 0) >= MAX_VIOLATIONS:
            return None
        try:
            sender, message = decode(data)
            if route and route != identity(sender):
                raise ProtocolViolation(f"{sender.name} speaks from another's address")
        except ProtocolViolation as error:
            self.violated(error, route)
            return None
        return sender, message

    def violated(self, error: ProtocolViolation, route: bytes = b"") -> None:
        """Counts it; without a route there is nobody to shut out."""
        self._counters.add("protocol_violations_total")
        if not route:
            return
        count = self._violations.pop(route, 0) + 1
        self._violations[route] = count
        if len(self._violations) > MAX_ROUTES:
            del self._violations[next(iter(self._violations))]
        if count in (1, MAX_VIOLATIONS):
            log.warning("message %d from %r dropped: %s", count, route, error.message)
