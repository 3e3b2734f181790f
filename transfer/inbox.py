"""Reads what comes from a socket: checked messages only, garbage counted and its sender shut out after a while."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio

from common.counters import Counters
from common.errors import ProtocolViolation
from common.messages import Message, Sender
from common.wire import decode, encode

log = logging.getLogger(__name__)

T = TypeVar("T")

TURN_S = 0.001
BURST_S = 0.006  # of reading blocks without a rest: some 50 of them
WAITED_S = 0.0005  # longer than a socket takes to give what it has
REST_TURNS = 17  # for every turn of reading blocks, while a step computes on the cores that we would use
MAX_VIOLATIONS = 100
SHUT_OUT_S = 2.0
MAX_ROUTES = 10_000
LONGEST_WHY = 200  # characters: names in it are the stranger's own
_ROUTE = re.compile(rb"[\w.-]{1,64}/\d{1,20}")
_NAMELESS = re.compile(rb"\0.{4}", re.DOTALL)
"""How a ROUTER calls a connection without a name: a newer one of its name has taken that over, and what is left there
are an honest process's late words; or none was ever given, which no process of ours does, and nobody listens to it."""


def identity(sender: Sender) -> bytes:
    """A ROUTER knows its peers by this: a restarted worker is a new peer, never a twin of its old pipe."""
    return f"{sender.name}/{sender.incarnation}".encode()


def send(
    socket: zmq.asyncio.Socket,
    frames: Sequence[bytes | memoryview],
    message: Message,
    me: Sender,
    counters: Counters,
) -> None:
    """Sends `frames` and behind them the encoded message; never waits. What the socket does not take is dropped and
    counted: the protocol says it again."""
    if not send_frames(socket, [*frames, encode(message, me)]):
        counters.add("unsent_messages_total", kind=type(message).__name__)


def send_frames(socket: zmq.asyncio.Socket, frames: Sequence[bytes | memoryview]) -> bool:
    """Whether the socket has taken them. Never waits."""
    # pyzmq's send tries at once and gives a future that is done either way.
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True))
    return not sent.done() or sent.exception() is None


class Turns:
    """Lets everybody else on the loop have a turn when reading one socket has kept it for TURN_S.

    A socket that has the next message at hand gives it without suspending its reader. So one peer that says a lot, or
    a saturated link, would keep timers, heartbeats and the other sockets waiting for as long as it pleases.

    While `computing`, whoever has read for BURST_S then rests for REST_TURNS after each turn: who copies and hashes
    blocks as fast as they come takes a core from the step beside it, and over tcp ZeroMQ's thread as much again. When a
    block took 500 us, 3 turns of rest made a decode step half as long again, 9 a sixth, none twice as long
    (`python -m tests.transfer.decode_beside_transfer`). It takes a fifth of that now, so that 17 let several times the
    bytes through for the same time. What is not read waits at its sender, who has no more credit than that.

    Only a saturated link ever rests. A prompt's last blocks, which somebody waits for, are read at once: what is not
    read is saved up, a turn in REST_TURNS + 1 of all time, BURST_S at most. (A rest in the midst of sixteen blocks had
    been most of the hand-over gap: 20 of 60 ms.)
    """

    def __init__(
        self,
        computing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._computing = computing
        self._clock = clock
        self._since = self._counted = clock()
        self._saved_s = BURST_S

    async def receive(self, message: Awaitable[T]) -> T:
        """The message. One that had to be waited for begins a turn: everybody had theirs meanwhile."""
        asked = self._clock()
        received = await message
        now = self._clock()
        if now - asked >= WAITED_S:
            self._since = now
        return received

    async def after_message(self) -> None:
        turn_s = self._clock() - self._since
        if turn_s >= TURN_S:
            await asyncio.sleep(self.rest_s(turn_s))
            self._since = self._clock()

    def rest_s(self, turn_s: float) -> float:
        """How long to rest after a turn of so many seconds."""
        now = self._clock()
        earned_s = (now - self._counted) / (REST_TURNS + 1)
        self._counted = now
        self._saved_s = max(0.0, min(self._saved_s + earned_s, BURST_S) - turn_s)
        return REST_TURNS * TURN_S if self._saved_s < TURN_S and self._computing() else 0.0


def only(frames: Sequence[bytes]) -> bytes:
    """The one frame of a message that has one; of any other nothing, which is not a message."""
    return frames[0] if len(frames) == 1 else b""


class Inbox:
    """Who sends MAX_VIOLATIONS pieces of garbage, nothing valid between them, is not listened to for SHUT_OUT_S.

    Not for ever: a ROUTER knows peers by a name that anybody who is let in can use, and an impostor must not be able
    to shut the real one out. The time is shorter than a worker may be silent, so that does not even cost a worker.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._violations: dict[bytes, int] = {}
        self._shut_out_until: dict[bytes, float] = {}

    def read(
        self,
        data: bytes | memoryview,
        route: bytes = b"",
        kinds: tuple[type[Message], ...] = (Message,),
    ) -> tuple[Sender, Message] | None:
        """The checked message, or None. `route` is the identity it came from, where the socket knows one: it must
        be the sender's own. `kinds` are those that this socket is for."""
        if self._is_shut_out(route):
            return None
        try:
            sender, message = decode(data)
            if not isinstance(message, kinds):
                raise ProtocolViolation(f"a {type(message).__name__}, which is not said here")
            if _NAMELESS.fullmatch(route):
                self._superseded(sender, message)
                return None
            if route and route != identity(sender):
                raise ProtocolViolation(f"{sender.name} speaks from another's address")
        except ProtocolViolation as error:
            self.violated(error, route)
            return None
        if self._violations:
            self._violations.pop(route, None)
        return sender, message

    def _superseded(self, sender: Sender, message: Message) -> None:
        """Dropped: what still counts is said again over the newer connection. Not a violation, for it is what a
        process that stood still finds, and what a link that was down brings."""
        self._counters.add("superseded_messages_total")
        who = _in_words(identity(sender))
        log.debug("a %s of %s dropped: its connection was taken over", type(message).__name__, who)

    def _is_shut_out(self, route: bytes) -> bool:
        until = self._shut_out_until.get(route)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._shut_out_until[route]
        return False

    def guard(self, handle: Callable[..., None], *message: object) -> None:
        """Handles one message. If that raises, we erred: it is logged and counted, and the next one is read. A reader
        that ended here would leave its process deaf, alive and beating."""
        try:
            handle(*message)
        except Exception:
            self._counters.add("internal_errors_total")
            log.exception("a message could not be handled")

    def violated(self, error: ProtocolViolation, route: bytes = b"") -> None:
        """Counts it; without a route there is nobody to shut out."""
        self._counters.add("protocol_violations_total")
        if not route:
            return
        count = self._violations.pop(route, 0) + 1
        if count in (1, MAX_VIOLATIONS):
            log.warning(
                "message %d from %s dropped: %s", count, _in_words(route), error.message[:LONGEST_WHY]
            )
        if count >= MAX_VIOLATIONS:
            _bounded(self._shut_out_until)[route] = self._clock() + SHUT_OUT_S
        else:
            _bounded(self._violations)[route] = count


def _in_words(route: bytes) -> str:
    """Who it is, where it bears a name of ours. To libzmq the beginning of an HTTP request that came to the wrong port
    is a name as well, and holds a key or a prompt: nothing of it is logged."""
    return route.decode() if _ROUTE.fullmatch(route) else f"a stranger ({len(route)} bytes for a name)"


def _bounded(table: dict[bytes, Any]) -> dict[bytes, Any]:
    """With room for one more: the oldest entry leaves."""
    if len(table) >= MAX_ROUTES:
        del table[next(iter(table))]
    return table
