"""One client's connection, with the limits that uvicorn's protocol has not.

    handshake  of TLS must be over in `head_timeout_s`, too; until then it is a `Handshake`, which counts as idle
    head       must be whole `head_timeout_s` after its first byte (or after the connection was made) and no longer
               than MAX_HEAD_BYTES: who connects and says nothing, or a byte a second, holds a place for that long
    pipeline   at most MAX_PIPELINED requests may wait for the one that is being answered, with bodies that together
               are no larger than one body may be; after one more those are answered, then it is told 400
    answer     when the client's socket is full, something must go out every `write_timeout_s`, also while the
               connection is being closed: else it is cut, as closing waits for a client that never reads
    number     over `max_connections` the one that has been idle longest makes room; if none is idle, the new one
               is told 503

The answer's bytes are handed to the system at once and the app waits until they are taken (write buffer of no
size), so what one connection holds in this process is one write of the app.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from common.errors import BadRequest, DeadlinePassed, KvferryError, NoWorker
from coordinator.door.handshake import Handshake
from coordinator.door.limits import Limits
from coordinator.errors_http import HeadTooLarge, code_of, error_headers, error_object

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 16
CONNECTION = "kvferry.connection"
"""In the state of a request's scope while it is being answered: the connection itself."""
DROPPED = "kvferry.dropped"
"""Set in the state of a request's scope when we cut its connection; absent when the client closed it."""


class Connections:
    """All connections of one server, over TLS if there is a context. `closed(reason)` is told of each that we end."""

    def __init__(
        self, limits: Limits, closed: Callable[[str], None], tls: ssl.SSLContext | None = None
    ) -> None:
        self.limits = limits
        self.closed = closed
        self._tls = tls
        self.handshakes: dict[Connection, Handshake] = {}  # of those that are not made yet
        self.idle: dict[Connection | Handshake, None] = {}  # without a request in progress, longest first

    def make(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection | Handshake:
        """In the place of a protocol class: uvicorn calls it for each connection."""
        connection = Connection(self, config, server_state, app_state, _loop)
        return connection if self._tls is None else Handshake(self, connection, self._tls)

    def make_room(self, connection: Connection) -> bool:
        """False when this one, which is counted already, has no place."""
        if len(connection.connections) + len(self.handshakes) <= self.limits.max_connections:
            return True
        longest_idle = next(iter(self.idle), None)
        if longest_idle is None:
            return False
        longest_idle.end("made_room")
        return True


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        all_connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = all_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0  # of whole lines
        # Of all, from the second read on: the first may have begun with something else.
        self._raw_head_bytes = 0
        self._one_too_many: KvferryError | None = None
        """Said after the answers to those before it; no more is read."""
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait behind it
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    # ------------------------------------------------------------ life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self in self._all.handshakes:
            self._all.handshakes[self].over()
        # Of one byte: with none, uvloop's TLS would take an empty buffer for a full one.
        transport.set_write_buffer_limits(high=1, low=0)
        if not self._all.make_room(self):
            self._refuse(NoWorker("Too many connections are open.", code="too_many_connections"))
            return
        self._all.idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.idle.pop(self, None)
        self._stop_head_timer()
        self._stop_write_timer()
        # uvicorn tells the newest request only: with others waiting behind it, the one that is being answered would
        # work on for nobody.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._let_go()
        super().connection_lost(exc)

    def _let_go(self) -> None:
        """Else the two would hold each other until the collector comes."""
        if self._running is not None:
            self._running.scope["state"].pop(CONNECTION, None)

    def end(self, reason: str) -> None:
        """Cuts it; what was not yet taken is lost."""
        self._all.closed(reason)
        if self._running is not None:
            self._running.scope["state"][DROPPED] = reason
        self._all.idle.pop(self, None)
        self.transport.abort()

    # ------------------------------------------------------------ heads

    def data_received(self, data: bytes) -> None:
        if self._one_too_many is not None:
            return  # not paused: a client that leaves must be seen
        if self._between_requests() and self._head_timer is None:
            self._expect_head()
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            # An endless line reaches no callback of the parser, so it is counted here.
            self._raw_head_bytes += len(data)
            if self._raw_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._raw_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._one_too_many = _pipeline_too_long()
            raise self._one_too_many
        self._all.idle.pop(self, None)
        super().on_headers_complete()
        # uvicorn stops reading while one waits, and would not see the client leave. They are bounded here instead.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline:  # it is of the newest, which waits
            waiting_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
            if waiting_bytes > self._all.limits.max_body_bytes:
                raise _pipeline_too_long()
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.scope["state"][CONNECTION] = self
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._let_go()
        super().on_response_complete()
        if self._between_requests() and not self.transport.is_closing():
            if self._one_too_many is not None:
                self._refuse(self._one_too_many)
            else:
                self._all.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses, or we do in one of its callbacks."""
        error = sys.exception()
        cause = error.__context__ if error is not None else None
        self._refuse(cause if isinstance(cause, KvferryError) else BadRequest(msg, code="invalid_http"))

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def _between_requests(self) -> bool:
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._all.limits.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        limit_s = self._all.limits.head_timeout_s
        if self._in_head:
            late = f"The head did not arrive within {limit_s:g} s."
            self._refuse(DeadlinePassed(late, code="request_head_timeout"))
        else:  # said nothing, or still sends the body of a request that has its answer
            self.end("request_head_timeout")

    def _refuse(self, error: KvferryError) -> None:
        """Says so and closes, where that cannot be taken for a part of an answer that is under way."""
        if not self._between_requests():
            if error is not self._one_too_many:
                self.end(code_of(error))
            return
        if self.transport.is_closing():
            return
        self._all.closed(code_of(error))
        body = error_object(error)
        headers = [*error_headers(error, body), (b"connection", b"close")]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.transport.close()

    # ------------------------------------------------------------ answers

    @property
    def takes_chunks(self) -> bool:
        """More of the answer that is under way could be written without waiting."""
        cycle = self._running
        return (
            cycle is not None
            and cycle.chunked_encoding is True
            and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
        )

    def write_chunk(self, data: bytes) -> None:
        """More of it, byte for byte as uvicorn writes it: only while it `takes_chunks`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._all.limits.write_timeout_s, self._look_at_writing)

    def _look_at_writing(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_writing()
        else:
            self.end("write_timeout")

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _head_too_large() -> KvferryError:
    return HeadTooLarge(f"The head is larger than {MAX_HEAD_BYTES} bytes.", code="head_too_large")


def _pipeline_too_long() -> KvferryError:
    return BadRequest("Too much was sent without waiting for an answer.", code="pipeline_too_long")
