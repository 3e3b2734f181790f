"""The coordinator's shell: the pure cluster and front, with sockets, a clock and waiting clients around them.

Implements `Gateway` for the HTTP side. Every effect of the pure objects is carried out here, in order; a timer
calls `turn` no later than they ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq

from common.effects import Effect, ToFront, ToWorker
from common.endpoints import Endpoint
from common.errors import (
    HTTP_ERRORS,
    DeadlinePassed,
    KvferryError,
    NotAdmitted,
    NoWorker,
    RequestFailed,
)
from common.fingerprint import digest
from common.front_messages import CancelRequest, Rejected, RequestEnded, StopRequest, Submit
from common.messages import (
    Accepted,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Later,
    Message,
    Refused,
    Register,
    Registered,
    RegistrationRefused,
    Role,
    Sender,
    Started,
    Tokens,
)
from common.request import FrontId, Incarnation, Request, RequestId, WorkerId
from common.version import VERSION
from common.wire import MAX_MESSAGE_BYTES
from coordinator.cluster import Cluster
from coordinator.errors_http import CODES
from coordinator.front import Front
from coordinator.metrics import Metrics
from coordinator.process_watch import ProcessWatch
from coordinator.streams import MailboxStream
from coordinator.worker_metrics import WorkerSnapshot, snapshot_of
from transfer.addresses import bind
from transfer.cluster_key import ClusterKey
from transfer.inbox import Inbox, Turns, identity, only, send
from transfer.pulling import Pull
from transfer.sockets import Sockets

log = logging.getLogger(__name__)

FRONT = FrontId("front-0")
SHUTTING_DOWN = "shutting_down"
LAST_WORDS_MS = 200
FROM_WORKERS = (Register, Heartbeat, Started, Ended, Accepted, Later, Refused)
_ANSWERS = (Registered, RegistrationRefused, HeartbeatAck)


class ControlPlane:
    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        *,
        collocated: bool,
        request_timeout_s: float,
        max_buffered_bytes: int = 1 << 20,
        key: ClusterKey | None = None,
    ) -> None:
        self._cluster = cluster
        self._front = Front()
        self._metrics = metrics
        self._collocated = collocated
        self._request_timeout_s = request_timeout_s
        self._max_buffered_bytes = max_buffered_bytes
        self._slow_readers = 0
        self._me = Sender("coordinator", Incarnation(time.time_ns() // 1000))
        self._streams: dict[RequestId, tuple[MailboxStream, int]] = {}  # and which choice of it
        self._limits: dict[MailboxStream, asyncio.TimerHandle] = {}
        self._sockets = Sockets(cluster.counters, key)
        self._control = self._sockets.listening(zmq.ROUTER, MAX_MESSAGE_BYTES, "--control")
        self._control.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._tokens = self._sockets.listening(zmq.PULL, MAX_MESSAGE_BYTES, "tokens")
        self._inbox = Inbox(cluster.counters)
        self._processes = ProcessWatch(self._process_ended)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._pull: Pull | None = None
        self._idle = asyncio.Event()
        self._system_fingerprint = ""

    # ------------------------------------------------------------ life

    def bind_tokens(self, where: Endpoint) -> str:
        """Binds the token PULL; its endpoint, which workers are told when they register. Raises CannotBind."""
        port = bind(self._tokens, where, "--tokens-port")
        return str(replace(where, port=port).told())

    def start(self, control: Endpoint) -> str:
        """Binds the control ROUTER and begins to listen; its endpoint. Raises CannotBind."""
        port = bind(self._control, control, "--control")
        self._tasks = [asyncio.create_task(self._read_control())]
        self._pull = Pull(self._tokens, self._hear_tokens)
        return str(replace(control, port=port))

    async def drain(self, timeout_s: float) -> None:
        """Refuses what comes, waits for what runs, and ends the rest with an error."""
        self._cluster.draining = True
        log.info("draining; requests under way: %d, %.1f s at most for them", len(self._streams), timeout_s)
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("%d requests did not finish in %g s", len(self._streams), timeout_s)
        self.end_all()

    def end_all(self) -> None:
        """Ends what waits or runs with an error, which answers still have a moment to say."""
        for stream in list(self._limits):
            self._give_up(stream, NoWorker("The service is shutting down.", code=SHUTTING_DOWN))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._pull is not None:
            self._pull.end()
        self._processes.close()
        for timer in (*self._limits.values(), *([self._timer] if self._timer else [])):
            timer.cancel()
        await self._sockets.end(LAST_WORDS_MS)

    # ------------------------------------------------------------ Gateway

    def mint_id(self, prefix: str) -> RequestId:
        return RequestId(f"{prefix}-{uuid.uuid4().hex}")

    async def submit(self, requests: Sequence[Request], deadline_s: float | None = None) -> MailboxStream:
        effects = self._cluster.submit(Submit(tuple(requests), deadline_s), time.monotonic())
        for effect in effects:
            if isinstance(effect, ToFront) and isinstance(effect.message, Rejected):
                raise _rejection(effect.message, draining=self._cluster.draining)
        stream = self._open(requests)
        self._carry_out(effects)
        return stream

    def _open(self, requests: Sequence[Request]) -> MailboxStream:
        stream = MailboxStream(
            [request.request_id for request in requests],
            on_stop=lambda request_id: self._leave(StopRequest(request_id), request_id),
            on_cancel=lambda request_id, reason: self._leave(CancelRequest(request_id, reason), request_id),
        )
        for choice, request in enumerate(requests):
            self._front.open(request.request_id, request.scored_prompt_tokens)
            self._streams[request.request_id] = (stream, choice)
        self._idle.clear()
        self._limits[stream] = asyncio.get_running_loop().call_later(
            self._request_timeout_s, self._give_up, stream, self._over_time()
        )
        return stream

    def max_model_len(self) -> int | None:
        return self._cluster.registry.max_model_len()

    def system_fingerprint(self) -> str:
        facts = self._cluster.registry.fingerprint()
        if facts is not None:  # else what answered last is about to fail, and was of the last one
            self._system_fingerprint = "fp_" + digest({**facts, "kvferry": VERSION})[:10]
        return self._system_fingerprint

    def health(self) -> str | None:
        if self._cluster.draining:
            return "The service is shutting down."
        if not self._cluster.registry.usable("decode"):
            return "No decode worker is ready."
        collocated = self._collocated or self._cluster.departures.no_prefill_wanted
        if not collocated and not self._cluster.registry.usable("prefill"):
            return "No prefill worker is ready."
        return None

    def workers(self) -> list[dict[str, Any]]:
        return self._cluster.registry.rows()

    def drain_worker(self, worker_id: str, deadline_s: float) -> dict[str, Any] | None:
        departures = self._cluster.departures
        return self._row_after(worker_id, departures.drain(WorkerId(worker_id), deadline_s, time.monotonic()))

    def set_role(self, worker_id: str, role: Role, deadline_s: float) -> dict[str, Any] | None:
        departures = self._cluster.departures
        effects = departures.change_role(WorkerId(worker_id), role, deadline_s, time.monotonic())
        return self._row_after(worker_id, effects)

    def _row_after(self, worker_id: str, effects: list[Effect] | None) -> dict[str, Any] | None:
        if effects is None:
            return None
        self._carry_out(effects)
        return next(row for row in self.workers() if row["id"] == worker_id)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return self._cluster.timeline(RequestId(request_id), time.monotonic())

    def metrics_text(self) -> bytes:
        cluster = self._cluster
        front_counters = {
            **cluster.counters.values,
            'late_messages_total{kind="TokenRow"}': float(self._front.late_rows),
            "lost_token_messages_total": float(self._front.lost_messages),
            "slow_readers_total": float(self._slow_readers),
        }
        own = WorkerSnapshot(
            worker="coordinator",
            role="coordinator",
            running=cluster.num_running(),
            waiting=cluster.num_waiting(),
            queue_age_s=cluster.queue.age_s(time.monotonic()),
            counters=front_counters,
        )
        queue = cluster.queue
        self._metrics.show_queues(queue.ages_s(time.monotonic()), queue.service_gap())
        return self._metrics.render([own, *map(snapshot_of, cluster.registry.all())])

    # ------------------------------------------------------------ ends

    def _leave(self, message: StopRequest | CancelRequest, request_id: RequestId) -> None:
        self._forget(request_id)
        self._carry_out(self._cluster.from_front(message, time.monotonic()))

    def _over_time(self) -> KvferryError:
        took = f"it took over {self._request_timeout_s:g} s"
        return RequestFailed(f"The request was ended: {took}.", code=CODES[DeadlinePassed])

    def _too_slow(self, stream: MailboxStream) -> None:
        self._slow_readers += 1
        stream.discard()
        limit = f"the limit of {self._max_buffered_bytes} bytes (--max-buffered-bytes)"
        self._give_up(
            stream,
            DeadlinePassed(f"The client reads too slowly: {limit} waited for it.", code="slow_reader"),
        )

    def _give_up(self, stream: MailboxStream, error: KvferryError) -> None:
        """One choice that failed fails its whole group: what a client asked for is not to be had any more."""
        stream.fail(error)
        stream.cancel(error.message)

    def _forget(self, request_id: RequestId) -> None:
        self._front.close(request_id)
        stream, choice = self._streams.pop(request_id, (None, 0))
        if stream is None:
            return
        stream.ended(choice)
        queued = self._cluster.tracker.queue_wait(request_id, time.monotonic())
        if queued is not None and choice == 0:  # one for each request, however many choices
            self._metrics.observe(self._metrics.queue_time, *queued)
        if stream.over:
            limit = self._limits.pop(stream, None)
            if limit is not None:
                limit.cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # ------------------------------------------------------------ sockets

    async def _read_control(self) -> None:
        turns = Turns()
        while True:
            route, *frames = await turns.receive(self._control.recv_multipart())
            read = self._inbox.read(only(frames), route, FROM_WORKERS)
            if read is not None:
                self._inbox.guard(self._take_control, read[1], read[0], route)
            await turns.after_message()

    def _take_control(self, message: Message, sender: Sender, route: bytes) -> None:
        self._carry_out(self._cluster.from_worker(message, sender, time.monotonic()), answer_to=route)
        if isinstance(message, Register) and self._knows(sender):
            self._processes.watch(message, sender)

    def _knows(self, sender: Sender) -> bool:
        return self._cluster.registry.get(WorkerId(sender.name), sender.incarnation) is not None

    def _process_ended(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._carry_out(self._cluster.worker_died(worker, incarnation, time.monotonic()))

    def _hear_tokens(self, data: bytes) -> None:
        read = self._inbox.read(data, kinds=(Tokens,))
        if read is not None:
            self._inbox.guard(self._take_tokens, read[1], read[0])

    def _take_tokens(self, tokens: Tokens, sender: Sender) -> None:
        if not self._knows(sender):
            self._front.late_rows += len(tokens.rows) + len(tokens.prompts)
            return
        now = time.monotonic()
        tokens, dropped, ends = self._cluster.hear_tokens(tokens, WorkerId(sender.name), now)
        self._front.late_rows += dropped
        if ends:
            self._carry_out(ends)
        deltas, heard = self._front.accept(tokens, sender.name, sender.incarnation, now)
        for delta in deltas:
            stream, choice = self._streams.get(delta.id, (None, 0))
            if stream is not None:
                stream.put(choice, delta)
                if stream.waiting_bytes > self._max_buffered_bytes:
                    self._too_slow(stream)
            if delta.finish is not None:
                self._forget(delta.id)
        self._tell_cluster(heard, now)

    def _tell_cluster(self, heard: list[Message], now: float) -> None:
        effects: list[Effect] = []
        for message in heard:
            effects += self._cluster.from_front(message, now)
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect], answer_to: bytes | None = None) -> None:
        """`answer_to`: where the message came from that these are the effects of."""
        for effect in effects:
            if isinstance(effect, ToWorker):
                self._to_worker(effect, answer_to)
            elif isinstance(effect, ToFront) and isinstance(effect.message, RequestEnded):
                self._ended(effect.message)
        while self._cluster.notices:
            log.info("%s", self._cluster.notices.popleft())
        self._set_timer()

    def _to_worker(self, effect: ToWorker, answer_to: bytes | None) -> None:
        """Answers go back the way the message came: an older life of a worker may be asking. Commands go to the life
        that is registered, under the name that its socket has for it, whoever else speaks as that worker."""
        message = effect.message
        route = answer_to if isinstance(message, _ANSWERS) else None
        worker = self._cluster.registry.get(effect.worker)
        if route is None and worker is not None:
            route = identity(Sender(worker.id, worker.incarnation))
        if route is not None:
            send(self._control, [route], message, self._me, self._cluster.counters)

    def _ended(self, message: RequestEnded) -> None:
        stream, _ = self._streams.get(message.id, (None, 0))
        self._forget(message.id)
        if stream is not None:
            error = HTTP_ERRORS.get(message.error, RequestFailed)
            self._give_up(stream, error(f"The request failed: {message.reason}.", code=CODES[error]))

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


def _rejection(message: Rejected, *, draining: bool) -> KvferryError:
    reason = f"{message.reason[:1].upper()}{message.reason[1:]}."
    if message.error == "NotAdmitted":
        return NotAdmitted(reason, retry_after_s=message.retry_after_s)
    error = HTTP_ERRORS.get(message.error, RequestFailed)
    code = message.code or CODES[error]
    if error is NoWorker and draining:
        code = SHUTTING_DOWN
    return error(reason, code=code, param=message.param or None)
