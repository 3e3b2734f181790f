"""Reads a request's body within its limits, and notices when the client leaves.

Bytes are counted before anything is parsed, so a body over the limit costs at most the limit, whatever its headers
said. Time is counted for the whole body, so one byte a second holds a connection for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from common.errors import BodyTooLarge, DeadlinePassed
from coordinator.door.json_body import parse_object

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]

Fields = TypeVar("Fields")

LARGE_BODY_BYTES = 64 << 10
DISCARD_LIMIT_S = 5.0
DISCARD_LIMIT_BYTES = 1 << 28


class ClientLeft(Exception):
    """The connection was closed by the other side."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, limit_s: float) -> bytes:
    """Raises BodyTooLarge, DeadlinePassed, ClientLeft."""
    if _announced_bytes(scope) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _read(receive, max_bytes)
    except TimeoutError as error:
        raise DeadlinePassed(
            f"The body did not arrive within {limit_s:g} s.", code="request_body_timeout"
        ) from error


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_fields(body: bytes, read: Callable[[dict[str, Any]], Fields]) -> Fields:
    """What `read` makes of the JSON object. A large one is read in a thread, so that streams go on. Raises BadRequest
    and what `read` raises."""
    if len(body) <= LARGE_BODY_BYTES:
        return read(parse_object(body))
    return await asyncio.to_thread(lambda: read(parse_object(body)))


def _announced_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        # The server's parser has refused lengths that are no number; what was announced need not be true.
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {max_bytes} bytes.", code="body_too_large")


async def discard_body(receive: Receive) -> None:
    """Reads on and forgets, for a bounded while. A client that is still sending when the connection is closed
    loses the answer that it was just given."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_LIMIT_S):
            while size < DISCARD_LIMIT_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left. Only to be called once the whole body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
