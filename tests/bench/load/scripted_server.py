"""A real HTTP server on a real socket whose chunks leave at known times: what the client measures is held to it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HANG_UP = b""
"""As the bytes of a step: the connection is closed there."""
Step = tuple[float, bytes]
"""Seconds to wait, then what to send."""
Script = Callable[[dict[str, Any]], Sequence[Step]]

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")


def text(said: str, **fields: Any) -> bytes:
    return event({"id": "cmpl-7", "choices": [{"index": 0, "text": said, "finish_reason": None, **fields}]})


def usage(prompt_tokens: int, output_tokens: int) -> bytes:
    counted = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return event({"id": "cmpl-7", "choices": [], "usage": counted})


def done() -> bytes:
    return event(b"[DONE]") + END


def status(code: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        code,
        len(body),
        body,
    )


def spoken(body: dict[str, Any], first_s: float = 0.0, gap_s: float = 0.0) -> list[Step]:
    """A whole answer of as many tokens as asked for, one in each chunk."""
    prompt = body.get("prompt") or body["messages"][0]["content"]
    prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    steps: list[Step] = [(0.0, EVENTS), (first_s, text("a"))]
    steps += [(gap_s, text("b"))] * (body["max_tokens"] - 1)
    return [*steps, (0.0, usage(prompt_tokens, body["max_tokens"]) + done())]


@dataclass(slots=True)
class ScriptedServer:
    """`bodies` are the requests it got, with `arrived_s` and `stepped_s` on `time.perf_counter`."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    stepped_s: list[float] = field(default_factory=list)
    """When each step's bytes left, of all answers."""
    connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    metrics: bytes = b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, RuntimeError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(self._told(head.split()[1]))
            return True
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")
        )
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.arrived_s.append(time.perf_counter())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for wait_s, data in self.script(body):
                if wait_s:
                    await asyncio.sleep(wait_s)
                if data == HANG_UP:
                    return False
                self.stepped_s.append(time.perf_counter())
                writer.write(data)
                await writer.drain()
        finally:
            self.at_once -= 1
        return True

    def _told(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            return status(200, json.dumps({"data": [{"id": "scripted", "max_model_len": 4096}]}).encode())
        if path == b"/metrics" and self.metrics:
            return status(200, self.metrics)
        return status(404)


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
