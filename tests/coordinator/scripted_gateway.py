"""A cluster in one object: answers every request with the ids of a script, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
import uvloop

from common.errors import KvferryError
from common.messages import FinishReason, Role
from common.request import Request, RequestId, TokenLogprobs, unpack_ids
from coordinator.door.http_server import listen, make_server
from coordinator.door.limits import Limits
from coordinator.errors_http import Conflict
from coordinator.gateway import TakeToken, TokenDelta
from coordinator.metrics import Metrics
from coordinator.worker_metrics import WorkerSnapshot

PROMPT_PIECE = 3


@dataclass
class Script:
    """`group` ids travel in each delta, `gap_s` apart; `error` is raised after `error_after` deltas."""

    ids: list[int]
    finish: FinishReason = "length"
    group: int = 1
    gap_s: float = 0.0
    first_s: float = 0.0
    admit_s: float = 0.0
    refuse: KvferryError | None = None
    error: Exception | None = None
    error_after: int = 0
    cached_tokens: int = 0
    top: int = 2


@dataclass
class _Choice:
    """How far one request's script has been read."""

    request: Request
    script: Script
    sent: int = 0
    deltas: int = 0
    scores: tuple[TokenLogprobs, ...] | None = None

    def next_scores(self) -> tuple[TokenLogprobs, ...]:
        """Of the next prompt tokens, at most `PROMPT_PIECE` at a time."""
        wanted = self.request.sampling.prompt_logprobs
        if wanted is None:
            return ()
        if self.scores is None:
            self.scores = prompt_scores(unpack_ids(self.request.prompt_ids), wanted)
        said, self.scores = self.scores[:PROMPT_PIECE], self.scores[PROMPT_PIECE:]
        return said


class ScriptedStream:
    """The choices of a group take turns."""

    def __init__(
        self, gateway: ScriptedGateway, requests: Sequence[Request], scripts: Sequence[Script]
    ) -> None:
        self.request_id = requests[0].request_id
        self._gateway = gateway
        both = zip(requests, scripts, strict=True)
        self._live = {index: _Choice(request, script) for index, (request, script) in enumerate(both)}
        self._slept_s = 0.0
        self._take_token: TakeToken | None = None

    def relay(self, take: TakeToken) -> None:
        self._take_token = take

    async def next(self) -> TokenDelta:
        """Of plain tokens every fourth comes by here though it could be relayed, as where a socket is full; unless the
        gateway `relays_all`, as the real one does."""
        while True:
            delta = await self._next()
            said_more = delta.finish or delta.logprobs or delta.prompt_logprobs or delta.cached_tokens
            if self._take_token is None or said_more or len(delta.ids) != 1:
                return delta
            by_mailbox = self._gateway.deltas_taken % 4 == 0 and not self._gateway.relays_all
            if by_mailbox or not self._take_token(delta.choice, delta.ids[0]):
                return delta
            self._gateway.deltas_relayed += 1

    async def _next(self) -> TokenDelta:
        assert self._live, "asked for more after the end"
        index, choice = next(iter(self._live.items()))
        script = choice.script
        if scores := choice.next_scores():
            del self._live[index]
            self._live[index] = choice
            return TokenDelta((), None, None, 0, index, scores)
        if pause_s := (script.gap_s if choice.deltas else script.first_s):
            await asyncio.sleep(max(0.0, pause_s - self._slept_s))
            self._slept_s = 0.0
        if script.error is not None and choice.deltas == script.error_after:
            self._live.clear()
            raise script.error
        ids = tuple(script.ids[choice.sent : choice.sent + script.group])
        choice.sent += len(ids)
        choice.deltas += 1
        self._gateway.deltas_taken += 1
        last = choice.sent >= len(script.ids)
        del self._live[index]
        if not last:
            self._live[index] = choice
        wanted = choice.request.sampling.logprobs
        logprobs = None if wanted is None else tuple(_logprobs(id, wanted) for id in ids)
        return TokenDelta(ids, logprobs, script.finish if last else None, script.cached_tokens, index)

    async def wait(self, limit_s: float) -> None:
        """What is slept here the next delta needs no more."""
        pause_s = max((choice.script.gap_s for choice in self._live.values()), default=0.0)
        self._slept_s = min(limit_s, pause_s)
        await asyncio.sleep(self._slept_s)

    def stop(self, choice: int) -> None:
        stopped = self._live.pop(choice, None)
        if stopped is not None:
            self._gateway.stopped.append(stopped.request.request_id)

    def cancel(self, reason: str) -> None:
        if self._live:
            self._live.clear()
            self._gateway.cancelled.append((self.request_id, reason, time.monotonic()))


def prompt_scores(ids: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Of all but the first; the token itself is never among the best."""
    return tuple(
        TokenLogprobs(-1.0 - index, tuple((id + 1 + n, -0.5 - n) for n in range(count)))
        for index, id in enumerate(ids[1:], 1)
    )


def _logprobs(id: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5 if id else float("-inf"), tuple((id + n, -0.5 - n) for n in range(count)))


@dataclass
class ScriptedGateway:
    script: Callable[[Request], Script] = lambda request: Script([])
    context: int | None = 8192
    unhealthy: str | None = None
    requests: list[Request] = field(default_factory=list)
    deadlines_s: list[float | None] = field(default_factory=list)
    stopped: list[RequestId] = field(default_factory=list)
    cancelled: list[tuple[RequestId, str, float]] = field(default_factory=list)
    withdrawn: list[tuple[RequestId, float]] = field(default_factory=list)
    deltas_taken: int = 0
    deltas_relayed: int = 0
    relays_all: bool = False
    drained: list[tuple[str, float]] = field(default_factory=list)
    changed: list[tuple[str, Role, float]] = field(default_factory=list)
    conflict: str = ""
    phase: str | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics(("default", "fast")))
    minted: int = 0

    def answers(self, *ids: int, **how: Any) -> None:
        self.script = lambda _: Script(list(ids), **how)

    def reset(self) -> None:
        for seen in (
            self.requests,
            self.deadlines_s,
            self.stopped,
            self.cancelled,
            self.withdrawn,
            self.drained,
            self.changed,
        ):
            seen.clear()
        self.deltas_taken, self.conflict, self.relays_all = 0, "", False
        self.context, self.unhealthy, self.phase = 8192, None, None

    def mint_id(self, prefix: str) -> RequestId:
        self.minted += 1
        return RequestId(f"{prefix}-{self.minted}")

    async def submit(self, requests: Sequence[Request], deadline_s: float | None = None) -> ScriptedStream:
        scripts = [self.script(request) for request in requests]
        try:
            await asyncio.sleep(scripts[0].admit_s)
        except asyncio.CancelledError:
            self.withdrawn.append((requests[0].request_id, time.monotonic()))
            raise
        if scripts[0].refuse is not None:
            raise scripts[0].refuse
        self.requests += requests
        self.deadlines_s.append(deadline_s)
        return ScriptedStream(self, requests, scripts)

    def max_model_len(self) -> int | None:
        return self.context

    def system_fingerprint(self) -> str:
        return "fp_0123456789"

    def health(self) -> str | None:
        return self.unhealthy

    def workers(self) -> list[dict[str, Any]]:
        return [{"id": "decode-0", "role": "decode", "becomes": None}]

    def drain_worker(self, worker_id: str, deadline_s: float) -> dict[str, Any] | None:
        row = next((row for row in self.workers() if row["id"] == worker_id), None)
        if row is None:
            return None
        self.drained.append((worker_id, deadline_s))
        return {**row, "state": "draining"}

    def set_role(self, worker_id: str, role: Role, deadline_s: float) -> dict[str, Any] | None:
        row = next((row for row in self.workers() if row["id"] == worker_id), None)
        if row is None or role == row["role"]:
            return row
        if self.conflict:
            raise Conflict(self.conflict, code="last_decode_worker")
        self.changed.append((worker_id, role, deadline_s))
        return {**row, "becomes": role, "state": "draining"}

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        if request_id == "known":
            return {"id": request_id}
        return None if self.phase is None else {"id": request_id, "phase": self.phase}

    def metrics_text(self) -> bytes:
        return self.metrics.render([WorkerSnapshot("decode-0", "decode", blocks_free=3)])


@dataclass
class Served:
    """A real uvicorn on a loopback port, in a thread of its own."""

    gateway: ScriptedGateway
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(
    app: Any, gateway: ScriptedGateway, limits: Limits | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Served]:
    listening = listen("127.0.0.1", 0)
    closed = gateway.metrics.connections_closed
    server = make_server(app, limits or Limits(), lambda reason: closed.labels(reason).inc(), tls)
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Served(gateway, server, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
