"""The app without sockets: one POST as ASGI messages, for tests that ask thousands of times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from coordinator.door.connection import CONNECTION
from coordinator.door.front_door import ASGIApp


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        found: dict[str, Any] = json.loads(self.body)
        return found

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, which ends in [DONE]."""
        assert self.status == 200, self.body
        *blocks, done, end = self.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all(block.startswith("data: ") for block in blocks), blocks
        return [json.loads(block.removeprefix("data: ")) for block in blocks]


class _Chunks:
    """What a connection does for a stream that has begun."""

    takes_chunks = True

    def __init__(self, parts: list[bytes]) -> None:
        self.write_chunk = parts.append


async def post(app: ASGIApp, path: str, body: dict[str, Any] | bytes) -> Reply:
    """The client stays until it has its answer."""
    unread = [body if isinstance(body, bytes) else json.dumps(body).encode()]
    status = 0
    parts: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop()}
        await asyncio.Future()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"x")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {CONNECTION: _Chunks(parts)},
    }
    await app(scope, receive, send)
    return Reply(status, b"".join(parts))
