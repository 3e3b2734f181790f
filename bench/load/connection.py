"""One HTTP/1.1 connection that streams answers: bytes are stamped and read in the callback that brings them.

Why our own and no library: a client that shares two cores with the server must cost next to nothing. Per streamed
token this one takes 19 µs of CPU where httpx takes 105 (16 streams of 64 tokens; every report says its own), and no
task of the event loop has to be woken before a chunk has its time. The parser is httptools, which uvicorn has anyway.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

from bench.load.answer_stream import AnswerStream, BadStream

KEPT_ERROR_BYTES = 4096


@dataclass(slots=True)
class Exchange:
    """One request on its way, and how it ended. `fault` is "" where the answer came whole."""

    stream: AnswerStream
    over: asyncio.Future[None]
    status: int = 0
    fault: str = ""
    words: str = ""
    left: bool = False
    end_s: float = 0.0
    is_events: bool = False
    error_body: bytearray = field(default_factory=bytearray)


class Connection(asyncio.Protocol):
    """`idle` when it may carry another request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: Exchange | None = None
        self._keep_alive = False
        self.idle_since_s = 0.0

    # ------------------------------------------------------------ for the client

    @property
    def idle(self) -> bool:
        return self._transport is not None and self._keep_alive and self._exchange is None

    def begin(self, exchange: Exchange, request: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            self._exchange = exchange
            self._finish("connection_lost", "closed before the request was sent")
            return
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = False
        self._transport.write(request)

    def close(self) -> None:
        """At once, in the middle of an answer too."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._keep_alive = True

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or self._parser is None:
            self.close()  # something that nobody asked for
            return
        exchange.end_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken("bad_http", f"{type(error).__name__}: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._exchange is None:
            return
        if self._exchange.is_events and self._exchange.stream.done:
            self._finish("", "")  # an answer whose end is that of its connection
        else:
            self._exchange.end_s = time.perf_counter()
            self._finish("connection_lost", str(error or "closed by the server"))

    # ------------------------------------------------------------ httptools, inside feed_data

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and name.lower() == b"content-type":
            self._exchange.is_events = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status != 200 or not exchange.is_events:
            exchange.error_body += body[: KEPT_ERROR_BYTES - len(exchange.error_body)]
            return
        try:
            exchange.stream.feed(body, exchange.end_s)
        except BadStream as error:
            self._broken(error.kind, str(error))
            return
        if exchange.stream.leaving:
            exchange.left = True
            self._broken("", "")

    def on_message_complete(self) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None or 100 <= exchange.status < 200:
            return
        self._keep_alive = parser.should_keep_alive()
        self.idle_since_s = exchange.end_s
        if exchange.status != 200:
            self._finish(f"http_{exchange.status}", exchange.error_body.decode("utf-8", "replace")[:400])
        elif not exchange.is_events:
            self._finish("bad_stream", f"no event stream: {bytes(exchange.error_body[:80])!r}")
        else:
            self._end_of_stream(exchange)
        if not self._keep_alive:
            self.close()

    # ------------------------------------------------------------ ends

    def _end_of_stream(self, exchange: Exchange) -> None:
        try:
            exchange.stream.end(exchange.end_s)
        except BadStream as error:
            self._finish(error.kind, str(error))
        else:
            exchange.end_s = exchange.stream.done_s
            self._finish("", "")

    def _broken(self, fault: str, words: str) -> None:
        self._finish(fault, words)
        self.close()

    def _finish(self, fault: str, words: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.over.done():
            exchange.fault, exchange.words = fault, words
            exchange.over.set_result(None)
