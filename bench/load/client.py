"""Sends planned requests to one service and makes a record of each; connections are kept for the next ones.

The clock of a request starts before its connection is opened, where none is idle: a service that is slow to take
connections is slow. `connect_s` says how much of it that was.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.load.answer_stream import AnswerStream
from bench.load.connection import Connection, Exchange
from bench.load.records import Outcome, Planned, Record

KEPT_IDLE_S = 3.0
"""uvicorn closes a connection that was idle for 5 s: one that may be closing carries nothing."""
REJECTED = ("http_429", "http_503")


class BadUrl(ValueError):
    """The message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    path: str
    host_header: str
    tls: ssl.SSLContext | None = None
    api_key: str = ""

    def request(self, body: bytes) -> bytes:
        """The whole request, as bytes."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host_header}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body


def target_of(base_url: str, endpoint: str, tls: ssl.SSLContext | None, api_key: str) -> Target:
    """Raises BadUrl."""
    try:
        parts = urlsplit(base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BadUrl(str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl("expected http://HOST:PORT or https://HOST:PORT")
    path = parts.path.rstrip("/") + endpoint
    return Target(
        parts.hostname,
        port,
        path,
        parts.netloc.rpartition("@")[2],
        tls if parts.scheme == "https" else None,
        api_key,
    )


class Client:
    def __init__(self, target: Target, request_timeout_s: float, connect_timeout_s: float) -> None:
        self._target = target
        self._request_timeout_s = request_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()

    async def ask(self, planned: Planned, request: bytes, started_s: float) -> Record:
        """Never raises for what the service does. `started_s`: the start of the run, on `time.perf_counter`."""
        exchange = Exchange(AnswerStream(planned.leave_after), asyncio.get_running_loop().create_future())
        sent_s = time.perf_counter()
        connect_s = 0.0
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._request_timeout_s):
                connection = self._kept()
                if connection is None:
                    connection = await self._connect()
                    connect_s = time.perf_counter() - sent_s
                connection.begin(exchange, request)
                await exchange.over
        except TimeoutError:
            limit_s = min(self._connect_timeout_s, self._request_timeout_s)
            exchange.fault, exchange.words = "timeout_connect", f"no connection within {limit_s:g} s"
            if connection is not None:
                exchange.fault, exchange.words = "timeout", f"no end within {self._request_timeout_s:g} s"
            exchange.end_s = time.perf_counter()
        except OSError as error:
            exchange.fault, exchange.words = "connect_failed", str(error)
            exchange.end_s = time.perf_counter()
        except asyncio.CancelledError:
            exchange.fault, exchange.words = "interrupted", "the run was ended"
            exchange.end_s = time.perf_counter()
        finally:
            self._give_back(connection)
        return _record(planned, exchange, sent_s, connect_s, started_s)

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        self._open.clear()

    def _kept(self) -> Connection | None:
        """The one that was used last: the others may have been closed by now."""
        while self._idle:
            connection = self._idle.pop()
            if connection.idle and time.perf_counter() - connection.idle_since_s < KEPT_IDLE_S:
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        self._open.add(connection)
        return connection

    def _give_back(self, connection: Connection | None) -> None:
        if connection is None:
            return
        if connection.idle:
            self._idle.append(connection)
        else:
            connection.close()
            self._open.discard(connection)


def _record(
    planned: Planned, exchange: Exchange, sent_s: float, connect_s: float, started_s: float
) -> Record:
    stream = exchange.stream
    return Record(
        index=planned.index,
        outcome=_outcome(exchange),
        due_s=planned.due_s,
        sent_s=sent_s - started_s,
        end_s=exchange.end_s - started_s,
        asked_prompt_tokens=planned.prompt_tokens,
        asked_output_tokens=planned.output_tokens,
        text_s=tuple(at_s - started_s for at_s in stream.text_s),
        connect_s=connect_s,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        cached_tokens=stream.cached_tokens,
        status=exchange.status,
        fault=exchange.fault,
        words=exchange.words,
        request_id=stream.request_id,
    )


def _outcome(exchange: Exchange) -> Outcome:
    if exchange.left:
        return "left"
    if exchange.fault == "interrupted":
        return "interrupted"
    if exchange.fault in REJECTED:
        return "rejected"
    return "failed" if exchange.fault else "ok"
