"""The coordinator's shell: the pure cluster and front, with sockets, a clock and waiting clients around them.

Implements `Gateway` for the HTTP side. Every effect of the pure objects is carried out here, in order; a timer
calls `turn` no later than they ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import zmq
import zmq.asyncio

from common.effects import Effect, ToFront, ToWorker
from common.errors import HTTP_ERRORS, CannotBind, KvferryError, NotAdmitted, RequestFailed
from common.messages import (
    MAX_MESSAGE_BYTES,
    CancelRequest,
    Message,
    Rejected,
    RequestEnded,
    Sender,
    StopRequest,
    Submit,
    Tokens,
)
from common.request import FrontId, Incarnation, Request, RequestId
from coordinator.cluster import Cluster
from coordinator.front import Front
from coordinator.metrics import Metrics
from coordinator.registry import Worker
from coordinator.streams import MailboxStream
from coordinator.worker_metrics import WorkerSnapshot
from transfer.inbox import Inbox, make_socket, send

log = logging.getLogger(__name__)

FRONT = FrontId("front-0")


class ControlPlane:
    def __init__(
        self, cluster: Cluster, metrics: Metrics, *, collocated: bool, request_timeout_s: float
    ) -> None:
        self._cluster = cluster
        self._front = Front()
        self._metrics = metrics
        self._collocated = collocated
        self._request_timeout_s = request_timeout_s
        self._me = Sender("coordinator", Incarnation(time.time_ns() // 1000))
        self._streams: dict[RequestId, MailboxStream] = {}
        self._limits: dict[RequestId, asyncio.TimerHandle] = {}
        self._context = zmq.asyncio.Context()
        self._control = make_socket(self._context, zmq.ROUTER, MAX_MESSAGE_BYTES)
        self._control.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._tokens = make_socket(self._context, zmq.PULL, MAX_MESSAGE_BYTES)
        self._inbox = Inbox(cluster.counters)
        self._routes: dict[str, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()

    # ------------------------------------------------------------ life

    def bind_tokens(self, host: str) -> str:
        """Binds the token PULL on a free port; its endpoint, which workers are told when they register."""
        port = self._tokens.bind_to_random_port(f"tcp://{host}")
        return f"tcp://{host}:{port}"

    def start(self, control: str) -> None:
        """Binds the control ROUTER and begins to listen. Raises CannotBind."""
        try:
            self._control.bind(control)
        except zmq.ZMQError as error:
            raise CannotBind(f"--control {control}: {error}") from error
        self._tasks = [
            asyncio.create_task(self._read_control()),
            asyncio.create_task(self._read_tokens()),
        ]

    async def drain(self, timeout_s: float) -> None:
        """Refuses what comes, waits for what runs, and ends the rest with an error."""
        self._cluster.draining = True
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("%d requests did not finish in %g s", len(self._streams), timeout_s)
        for request_id in list(self._streams):
            self._give_up(request_id, "the service is shutting down")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for timer in (*self._limits.values(), *([self._timer] if self._timer else [])):
            timer.cancel()
        await asyncio.sleep(0)
        self._context.destroy(linger=200)

    # ------------------------------------------------------------ Gateway

    def mint_id(self, prefix: str) -> RequestId:
        return RequestId(f"{prefix}-{uuid.uuid4().hex}")

    async def submit(self, request: Request, deadline_s: float | None = None) -> MailboxStream:
        request_id = request.request_id
        stream = MailboxStream(
            request_id,
            on_stop=lambda: self._leave(StopRequest(request_id), request_id),
            on_cancel=lambda reason: self._leave(CancelRequest(request_id, reason), request_id),
        )
        self._front.open(request_id)
        self._streams[request_id] = stream
        self._idle.clear()
        self._limits[request_id] = asyncio.get_running_loop().call_later(
            self._request_timeout_s, self._give_up, request_id, f"it took over {self._request_timeout_s:g} s"
        )
        effects = self._cluster.submit(Submit(request, deadline_s), time.monotonic())
        for effect in effects:
            if isinstance(effect, ToFront) and isinstance(effect.message, Rejected):
                self._forget(request_id)
                raise _rejection(effect.message)
        self._carry_out(effects)
        return stream

    def max_model_len(self) -> int | None:
        return self._cluster.registry.max_model_len()

    def health(self) -> str | None:
        if self._cluster.draining:
            return "The service is shutting down."
        if not self._cluster.registry.usable("decode"):
            return "No decode worker is ready."
        if not self._collocated and not self._cluster.registry.usable("prefill"):
            return "No prefill worker is ready."
        return None

    def workers(self) -> list[dict[str, Any]]:
        return self._cluster.registry.rows()

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return self._cluster.timeline(RequestId(request_id), time.monotonic())

    def metrics_text(self) -> bytes:
        now = time.monotonic()
        cluster = self._cluster
        front_counters = {
            **cluster.counters.values,
            'late_messages_total{kind="TokenRow"}': float(self._front.late_rows),
            "lost_token_messages_total": float(self._front.lost_messages),
        }
        own = WorkerSnapshot(
            worker="coordinator",
            role="coordinator",
            running=cluster.num_running(),
            waiting=cluster.num_waiting(),
            queue_age_s=cluster.queue.age_s(now),
            counters=front_counters,
        )
        return self._metrics.render([own, *map(_snapshot, cluster.registry.all())])

    # ------------------------------------------------------------ ends

    def _leave(self, message: StopRequest | CancelRequest, request_id: RequestId) -> None:
        self._forget(request_id)
        self._carry_out(self._cluster.from_front(message, time.monotonic()))

    def _give_up(self, request_id: RequestId, why: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(RequestFailed(f"The request was ended: {why}.", code="timeout"))
            self._leave(CancelRequest(request_id, why), request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._front.close(request_id)
        self._streams.pop(request_id, None)
        limit = self._limits.pop(request_id, None)
        if limit is not None:
            limit.cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # ------------------------------------------------------------ sockets

    async def _read_control(self) -> None:
        while True:
            route, *frames = await self._control.recv_multipart()
            read = self._inbox.read(frames[-1] if frames else b"", route)
            if read is None:
                continue
            sender, message = read
            self._routes[sender.name] = route
            self._carry_out(self._cluster.from_worker(message, sender, time.monotonic()))

    async def _read_tokens(self) -> None:
        while True:
            read = self._inbox.read((await self._tokens.recv_multipart())[-1])
            if read is not None and isinstance(read[1], Tokens):
                self._take_tokens(read[1], read[0])

    def _take_tokens(self, tokens: Tokens, sender: Sender) -> None:
        now = time.monotonic()
        deltas, heard = self._front.accept(tokens, sender.name, sender.incarnation, now)
        for delta in deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                stream.put(delta)
            if delta.finish is not None:
                self._forget(delta.id)
        self._tell_cluster(heard, now)

    def _tell_cluster(self, heard: list[Message], now: float) -> None:
        effects: list[Effect] = []
        for message in heard:
            effects += self._cluster.from_front(message, now)
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorker):
                self._to_worker(effect)
            elif isinstance(effect, ToFront) and isinstance(effect.message, RequestEnded):
                self._ended(effect.message)
        self._set_timer()

    def _to_worker(self, effect: ToWorker) -> None:
        route = self._routes.get(effect.worker)
        if route is not None:
            send(self._control, [route], effect.message, self._me, self._cluster.counters)

    def _ended(self, message: RequestEnded) -> None:
        stream = self._streams.get(message.id)
        if stream is not None:
            error = HTTP_ERRORS.get(message.error, RequestFailed)
            stream.fail(error(f"The request failed: {message.reason}."))
        self._forget(message.id)

    # ------------------------------------------------------------ the clock

    def _set_timer(self) -> None:
        deadline = self._cluster.next_deadline(time.monotonic())
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        delay_s = max(0.001, deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._tell_cluster(self._front.gaps(now), now)
        self._carry_out(self._cluster.turn(now))


def _rejection(message: Rejected) -> KvferryError:
    reason = f"{message.reason[:1].upper()}{message.reason[1:]}."
    if message.error == "NotAdmitted":
        return NotAdmitted(reason, retry_after_s=message.retry_after_s)
    return HTTP_ERRORS.get(message.error, RequestFailed)(reason)


def _snapshot(worker: Worker) -> WorkerSnapshot:
    load = worker.load
    return WorkerSnapshot(
        worker=worker.id,
        role=worker.role,
        running=load.running,
        waiting=load.waiting,
        blocks_free=load.blocks_free,
        blocks_held=load.blocks_held,
        blocks_cached=load.blocks_cached,
        counters=worker.totals(),
        histograms=worker.histogram_totals(),
    )
