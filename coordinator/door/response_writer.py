"""Writes one HTTP response: whole, or as a stream of events, or an error in either.

It knows what is on the wire already, so an error becomes a status where that is still possible and an `error`
event where it is not. A stream that failed has no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from common.errors import KvferryError
from coordinator.door.http_body import Receive, Send, discard_body
from coordinator.errors_http import error_headers, error_object

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
COMMENT = b": waiting\n\n"


class Chunks(Protocol):
    """How more of a stream is written without a task having to wait (`connection.py`)."""

    @property
    def takes_chunks(self) -> bool: ...
    def write_chunk(self, data: bytes) -> None: ...


class ResponseWriter:
    """`status` is 0 until the status line is out. `writing` while the client's socket is full.

    Several tasks may write: one at a time, in the order in which they asked. Any of them may be cancelled while it
    waits, and what it had not yet sent is then not sent.

    `watch` is a task that ends when the client has left. Sending to nobody returns at once, so a write after that
    waits for whoever holds the watch to end the writing task: an answer is not brought to its end for nobody.

    `events_now` is the short way: six coroutines deep, a token's bytes cost more than they are worth. It goes by what
    wraps `send`, none of which touches the body of a stream that has begun.
    """

    def __init__(self, send: Send, chunks: Chunks | None = None) -> None:
        self._send = send
        self._chunks = chunks
        self._streaming = False
        self.status = 0
        self.ended = False
        self._turn = asyncio.Lock()
        self.watch: asyncio.Task[None] | None = None
        self.last_write_s = time.monotonic()

    @property
    def writing(self) -> bool:
        return self._turn.locked()

    async def whole(
        self, body: bytes, content_type: bytes = b"application/json", *, status: int = 200
    ) -> None:
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        async with self._turn:
            await self._start(status, headers)
            await self._body(body, more=False)

    async def events(self, data: bytes, more: bool = True) -> None:
        """Events of a stream, which begins with the first of them."""
        async with self._turn:
            if not self.status:
                await self._start_stream()
            await self._body(data, more)

    @property
    def goes_at_once(self) -> bool:
        """`events_now` may be called."""
        return (
            self._streaming
            and self._chunks is not None
            and self._chunks.takes_chunks
            and not (self.ended or self._turn.locked())
            and (self.watch is None or not self.watch.done())
        )

    def events_now(self, data: bytes, now_s: float) -> None:
        assert self._chunks is not None
        self._chunks.write_chunk(data)
        self.last_write_s = now_s

    async def comment(self) -> None:
        """Keeps the connection alive in the eyes of proxies. Clients skip it."""
        async with self._turn:
            if not self.ended:
                if not self.status:
                    await self._start_stream()
                await self._body(COMMENT, more=True)

    async def error(self, error: KvferryError, unread: Receive | None = None) -> None:
        """`unread` is given when the request's body has not been read to its end: the connection is closed."""
        async with self._turn:
            await self._error(error, unread)

    async def _start_stream(self) -> None:
        await self._start(200, STREAM_HEADERS)
        self._streaming = True

    async def _error(self, error: KvferryError, unread: Receive | None) -> None:
        body = error_object(error)
        if not self.status:
            headers = error_headers(error, body)
            if unread is None:
                await self._start(error.status, headers)
                await self._body(body, more=False)
            else:
                await self._start(error.status, [*headers, (b"connection", b"close")])
                await self._body(body, more=True)
                await discard_body(unread)
                await self._body(b"", more=False)
        elif self._streaming and not self.ended:
            await self._body(b"event: error\ndata: " + body + b"\n\n", more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    async def _body(self, data: bytes, more: bool) -> None:
        self.ended = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        if self.watch is not None and self.watch.done():
            await asyncio.get_running_loop().create_future()
        self.last_write_s = time.monotonic()
