"""What the front costs per streamed token and per request: a real coordinator process between workers and clients.

This process plays one decode worker (control and token sockets) and all clients (one HTTP connection each), so the
coordinator's processor time is everything that stands between a worker's message and the bytes in a client's socket:
message read and checked, tracker, detokenizer, stop strings, event, HTTP, system calls. Steps come at a fixed pace,
as from a worker, all streams in one message.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from common.fingerprint import Value
from common.messages import (
    Accepted,
    Decode,
    FinishReason,
    Heartbeat,
    Load,
    Message,
    PeerAddress,
    Register,
    Registered,
    Sender,
    Started,
    TokenRow,
    Tokens,
)
from common.paths import child_environment
from common.request import Incarnation, Key, WorkerId
from common.wire import PROTOCOL_MAJOR, decode, encode
from coordinator.tokenizer import Tokenizer
from transfer.inbox import identity

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0
WARM_UP_STREAMS = 4
STEP_S = 0.02
HEARTBEAT_S = 0.5
ME = Sender("bench-decode", Incarnation(1))


@dataclass(frozen=True, slots=True)
class FrontCost:
    """Processor microseconds of the coordinator: per token with `streams` answers streamed at once, and per request
    from its connection to the worker's command."""

    streams: int
    token_us: float
    request_us: float


def front_costs(
    model: Path, streams: Sequence[int], *, steps: int = 100, step_s: float = STEP_S
) -> Iterator[FrontCost]:
    """One after the other, at one coordinator, after a few streams that warm it up. Raises OSError where that does not
    start."""
    with _coordinator(model) as (port, control, pid):
        worker = _Worker(model, control)
        try:
            _measure(worker, port, pid, WARM_UP_STREAMS, 3, step_s)
            for count in streams:
                yield _measure(worker, port, pid, count, steps, step_s)
        finally:
            worker.close()


def _measure(worker: _Worker, port: int, pid: int, streams: int, steps: int, step_s: float) -> FrontCost:
    clients = _Clients(port, streams)
    try:
        began_ns = _processor_ns(pid)
        clients.ask(steps + 2)
        worker.take(streams)
        request_us = (_processor_ns(pid) - began_ns) / 1000 / streams
        worker.step(0)  # status line, headers and first chunk
        clients.read_for(0.1)
        began_ns = _processor_ns(pid)
        due = time.monotonic()
        for index in range(1, steps + 1):
            worker.step(index)
            due += step_s
            clients.read_for(max(0.0, due - time.monotonic()))
        token_us = (_processor_ns(pid) - began_ns) / 1000 / (streams * steps)
        worker.step(steps + 1, finish="length")
        clients.read_to_the_end()
        return FrontCost(streams, token_us, request_us)
    finally:
        clients.close()


def _processor_ns(pid: int) -> int:
    """Of all threads of a process, to the nanosecond (`utime` counts in hundredths of a second)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


# ---------------------------------------------------------------- the coordinator


@contextmanager
def _coordinator(model: Path) -> Iterator[tuple[int, int, int]]:
    """Ports of HTTP and control, and the process id."""
    port, control = _free_port(), _free_port()
    command = [
        sys.executable,
        "-P",
        "-m",
        "coordinator",
        f"--model={model}",
        f"--port={port}",
        "--collocated",
    ]
    command += [f"--control=tcp://127.0.0.1:{control}", "--log-level=warning"]
    child = subprocess.Popen(command, env=child_environment(os.environ), stdin=subprocess.DEVNULL)
    try:
        _until_listening(child, port)
        yield port, control, child.pid
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _until_listening(child: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        if child.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"the coordinator did not start (exit code {child.poll()})")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)


# ---------------------------------------------------------------- the worker


class _Worker:
    """One decode worker as the coordinator sees it."""

    def __init__(self, model: Path, control: int) -> None:
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.DEALER)
        self._control.setsockopt(zmq.IDENTITY, identity(ME))
        self._control.connect(f"tcp://127.0.0.1:{control}")
        self._tokens = self._context.socket(zmq.PUSH)
        self._seq = 0
        self._beat_at = 0.0
        self._keys: list[Key] = []
        self._say(_card(model))
        registered = self._hear(START_LIMIT_S)
        assert isinstance(registered, Registered), registered
        (where,) = registered.fronts.values()
        self._tokens.connect(where.replace("*", "127.0.0.1"))

    def close(self) -> None:
        self._control.close(linger=0)
        self._tokens.close(linger=0)
        self._context.term()

    def take(self, count: int) -> None:
        """Waits for so many commands, and answers each as a worker does."""
        while len(self._keys) < count:
            message = self._hear(HEARTBEAT_S / 2)
            if isinstance(message, Decode):
                self._keys.append(message.key)
                self._say(Accepted(*message.key))
                self._say(Started(*message.key, "prefilling"))
            self._beat()

    def step(self, index: int, *, finish: FinishReason | None = None) -> None:
        """A token of every request it has: its text is a word of some letters."""
        self._seq += 1
        rows = tuple(TokenRow(*key, index, (1000 + index % 500,), None, finish) for key in self._keys)
        self._tokens.send(encode(Tokens(self._seq, rows), ME))
        if finish is not None:
            self._keys = []
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_S
            live = tuple((*key, "decoding") for key in self._keys)
            load = Load(len(live), 0, 0, 1000, 0, 0, STEP_S)
            self._say(Heartbeat(load, 0.0, live, {}, {}, {}))
            while self._control.poll(0):
                self._control.recv()

    def _say(self, message: Message) -> None:
        self._control.send(encode(message, ME))

    def _hear(self, limit_s: float) -> Message | None:
        return decode(self._control.recv())[1] if self._control.poll(int(limit_s * 1000)) else None


def _card(model: Path) -> Register:
    tokenizer = Tokenizer(model)
    fingerprint: dict[str, Value] = {
        "protocol": PROTOCOL_MAJOR,
        "vocab_size": tokenizer.vocab_size,
    }
    if tokenizer.tokenizer_hash is not None:
        fingerprint["tokenizer"] = tokenizer.tokenizer_hash
    return Register(
        role="decode",
        fingerprint=fingerprint,
        address=PeerAddress(WorkerId(ME.name), ME.incarnation, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        channels=("tcp",),
        blocks_total=1 << 16,
        block_size=16,
        block_bytes=1,
        max_model_len=8192,
        max_num_seqs=4096,
        max_num_batched_tokens=1 << 16,
        device="cpu",
        threads=1,
        pid=os.getpid(),
        host="bench",
        versions={},
    )


# ---------------------------------------------------------------- the clients


class _Clients:
    """Streams over one connection each; `done` of them have had their last event. Read now and then, not whenever one
    has something: clients on another machine would take no processor time here."""

    def __init__(self, port: int, count: int) -> None:
        self.done = 0
        self._select = selectors.DefaultSelector()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for one in self._sockets:
            one.setblocking(False)
            self._select.register(one, selectors.EVENT_READ)

    def ask(self, max_tokens: int) -> None:
        for index, one in enumerate(self._sockets):
            one.send(_post(_body(index, max_tokens)))

    def read_for(self, seconds: float) -> None:
        """Takes what comes, for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._select.select(left):
                self._take(key.fileobj)
            time.sleep(min(0.002, max(0.0, until - time.monotonic())))

    def read_to_the_end(self) -> None:
        until = time.monotonic() + END_LIMIT_S
        while self.done < len(self._sockets):
            assert time.monotonic() < until, f"{self.done} of {len(self._sockets)} streams came to their end"
            self.read_for(0.01)

    def _take(self, one: Any) -> None:
        data: bytes = one.recv(1 << 16)
        assert data, "the coordinator closed a connection"
        assert b"error" not in data, data
        self.done += data.count(b"data: [DONE]")

    def close(self) -> None:
        self._select.close()
        for one in self._sockets:
            one.close()


def _body(index: int, max_tokens: int) -> bytes:
    fields = {
        "model": "smollm2-135m-instruct",
        "prompt": [1000 + index] * 8,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    return json.dumps(fields).encode()


def _post(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
