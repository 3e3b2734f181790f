"""Where all sockets between processes are made: with bounds, with the cluster's key, and watched while they connect.

With a key every socket speaks CURVE, on loopback too. Who listens lets in the cluster's own pair and nobody else:
to know its public half is not enough. ZeroMQ asks about each caller over `inproc://zeromq.zap.01`, and answers are
made by this loop; while none comes, nobody is let in.

What bounds a socket: the length of a message, the time of a handshake (connections that never finish one are closed,
however many), of a call, and of unanswered bytes, by which a machine that vanished is noticed (TCP alone takes a
quarter of an hour). ZeroMQ bounds no number of connections: open files do, so a process asks for all it may have.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import resource
import struct
from collections.abc import Callable
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils import z85

from common.counters import Counters
from transfer.cluster_key import ClusterKey
from transfer.handshakes import ENDS_THE_CALLS, FAILED, Failures
from transfer.presence import PRESENCE, Presence

LINGER_MS = 1000
UNSENT_MESSAGES = 100_000  # more are dropped, and said again by the protocol
UNREAD_MESSAGES = 1_000  # more wait at their sender: what we are slow to read is bounded here, and not lost
BACKLOG = 1024
HANDSHAKE_MS = 5000
CALL_MS = 2000
UNANSWERED_MS = 6000
KEEPALIVE_S = (5, 2, 3)  # silence, between probes; how many of them
OPEN_FILES = 65_536
LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc takes here
KEPT_BYTES = 64 << 20  # a few peers' blocks in flight
MAX_SOCKETS = 16_384  # of ZeroMQ's own 1023 a way takes six, with those that its events come by
DOMAIN = b"kvferry"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_EVENT = struct.Struct("=hi")
_ZAP = "inproc://zeromq.zap.01"
_ADMITTED, _REFUSED = b"200", b"400"


class _Socket(zmq.asyncio.Socket):
    """With its events, which end first when it closes, whoever closes it: ZeroMQ's I/O thread waits for ever, and all
    its sockets with it, where an event finds nobody that listens."""

    events: zmq.asyncio.Socket | None = None
    hearing: asyncio.Task[None] | None = None

    def close(self, linger: int | None = None) -> None:
        if self.events is not None and self.hearing is not None:
            self.disable_monitor()
            self.hearing.cancel()
            self.events.close(linger=0)
            self.events = None
        super().close(linger)


class Sockets:
    """Those of one part of a process. Use inside a running event loop; `end` closes them all."""

    def __init__(self, counters: Counters, key: ClusterKey | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._key = key
        self._failures = Failures(counters, keyed=key is not None)
        self._numbers = itertools.count()
        self._open: list[_Socket] = []
        self._admitting: asyncio.Task[None] | None = None

    def listening(self, kind: int, max_bytes: int, name: str) -> zmq.asyncio.Socket:
        """A socket to bind. `name` is what it is called in the log."""
        socket = self._socket(kind, max_bytes)
        if self._key is not None:
            self._answer_who_may_come()
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

        def hear(event: int, value: int) -> None:
            self._failures.note(name, event, value, listens=True)

        self._watch(socket, FAILED, hear)
        return socket

    def calling(
        self,
        kind: int,
        max_bytes: int,
        name: str,
        *,
        presence: Presence | None = None,
        gave_up: Callable[[], None] | None = None,
    ) -> zmq.asyncio.Socket:
        """A socket to connect; `presence` watches whether anybody is there. `gave_up`: it has been refused and will
        not call again; another one might."""
        socket = self._socket(kind, max_bytes)
        if self._key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)

        def hear(event: int, value: int) -> None:
            if event & FAILED:
                self._failures.note(name, event, value, listens=False)
            if event & ENDS_THE_CALLS and gave_up is not None:
                gave_up()
            if presence is not None:
                presence.hear(event)

        self._watch(socket, FAILED | (0 if presence is None else PRESENCE), hear)
        return socket

    async def end(self, linger_ms: int) -> None:
        for socket in self._open:
            socket.close(linger_ms)
        if self._admitting is not None:
            self._admitting.cancel()
        await asyncio.sleep(0)
        self._context.destroy(linger=linger_ms)

    # ------------------------------------------------------------ inside

    def _socket(self, kind: int, max_bytes: int) -> _Socket:
        """It neither keeps a process from leaving nor takes a message longer than `max_bytes`."""
        socket = cast(_Socket, self._context.socket(kind, socket_class=_Socket))
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, UNSENT_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CALL_MS)
        socket.setsockopt(zmq.TCP_MAXRT, UNANSWERED_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        for option, value in zip(
            (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT), KEEPALIVE_S, strict=True
        ):
            socket.setsockopt(option, value)
        return socket

    def _watch(self, socket: _Socket, kinds: int, hear: Callable[[int, int], None]) -> None:
        where = f"inproc://handshakes-{next(self._numbers)}"
        socket.monitor(where, kinds)
        events: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's I/O thread waits where an event finds no room, too
        events.connect(where)
        socket.events = events
        socket.hearing = asyncio.get_running_loop().create_task(_hear(events, hear))
        self._open = [*(one for one in self._open if not one.closed), socket]

    def _answer_who_may_come(self) -> None:
        if self._admitting is None:
            assert self._key is not None
            questions: zmq.asyncio.Socket = self._context.socket(zmq.REP)
            questions.bind(_ZAP)
            admitting = _admit(questions, z85.decode(self._key.public))
            self._admitting = asyncio.get_running_loop().create_task(admitting)


async def _hear(events: zmq.asyncio.Socket, hear: Callable[[int, int], None]) -> None:
    while True:
        hear(*_EVENT.unpack((await events.recv_multipart())[0]))


async def _admit(questions: zmq.asyncio.Socket, ours: bytes) -> None:
    """ZeroMQ's authentication protocol: version, number, domain, address, identity, mechanism, credentials."""
    while True:
        version, number, domain, _, _, mechanism, *credentials = await questions.recv_multipart()
        good = (domain, mechanism, credentials) == (DOMAIN, b"CURVE", [ours])
        status, words = (_ADMITTED, b"OK") if good else (_REFUSED, b"not a key of this cluster")
        await questions.send_multipart([version, number, status, words, b"", b""])


def keep_freed_memory() -> None:
    """Blocks travel in pieces of memory that glibc would give back to the system as soon as they are freed, and get
    page by page, each zeroed, for the next one: that took a third of a block's way over tcp. Up to KEPT_BYTES stay with
    this process now. To be called once; what is large and stays should have been allocated before."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library, with habits of its own
        return
    mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def allow_open_files() -> None:
    """Up to OPEN_FILES, as far as the system lets this process have them. To be called once, at its start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
