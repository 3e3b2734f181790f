"""A worker's loop: drives a pure worker with sockets, a clock and the thread that runs the model.

Event-driven, no polling: after each message, frame, finished step or deadline comes one turn:
schedule the next step if none is out, then carry out what the worker wants said. The model step runs in its own
thread; messages are taken, blocks copied and rows sent while it computes. Heartbeats leave from this loop and
carry the age of the step that is out, so a hung kernel does not look healthy.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from common.batching import Batch, RowResult, Sequence
from common.effects import Effect, SendBlock, ToCoordinator, ToFront, ToReceiver, ToSender
from common.errors import BadConfiguration
from common.messages import (
    AboutRequest,
    Block,
    Drain,
    Heartbeat,
    HeartbeatAck,
    Message,
    Register,
    Registered,
    RegistrationRefused,
    Sender,
)
from common.records import Records
from common.request import Grammar, Key, WorkerId
from kernels.cache import PagedCache
from transfer.channel import store
from transfer.grammar_gate import GrammarGate
from transfer.grammars_in_use import GrammarsInUse, Holds
from transfer.links import Links, peer_of

log = logging.getLogger(__name__)

REGISTER_AGAIN_S = 1.0
_REMEDIES = {
    "worker_id": "give it another --worker-id",
    "transfer": "let one --transfer be possible for both",
}
_OTHERWISE = (
    "KV may only pass between equals: start it with the model, dtype, block size and release of the others"
)
SILENCE_S = 2.5  # under the time after which the coordinator takes a silent worker for lost


class PureWorker(Protocol):
    """What the loop drives: `PrefillWorker` and `DecodeWorker`."""

    records: Records
    draining: bool

    @property
    def idle(self) -> bool: ...
    def handle(self, message: Message, sender: WorkerId, now: float) -> list[Effect]: ...
    def peer_gone(self, worker: WorkerId, now: float) -> list[Effect]: ...
    def place(self, header: Block, sender: WorkerId) -> int | None: ...
    def block(self, header: Block, sender: WorkerId, good: bool, now: float) -> int | None: ...
    def schedule(self, now: float) -> Batch | None: ...
    def finish(self, batch: Batch, results: Seq[RowResult], step_s: float, now: float) -> list[Effect]: ...
    def fail_row(self, seq: Sequence, reason: str, now: float) -> list[Effect]: ...
    def turn(self, now: float) -> list[Effect]: ...
    def next_deadline(self) -> float | None: ...
    def heartbeat(self, progress_age_s: float) -> Heartbeat: ...
    def abort(self, key: Key, reason: str, now: float) -> list[Effect]: ...
    def fail(self, key: Key, error: Exception, now: float) -> list[Effect]: ...
    def live_keys(self) -> list[Key]: ...


Step = Callable[[Batch], tuple[Seq[RowResult], dict[int, str]]]
"""Runs a batch: a result per row, and for rows that could not be computed, their index and why."""


class Grammars(Holds, Protocol):
    """What the steps to come have compiled."""

    def is_compiled(self, grammar: Grammar) -> bool: ...
    def compile(self, grammar: Grammar) -> str | None:
        """In a thread of its own. Why it cannot be compiled, where it cannot."""
        ...


class WorkerLoop:
    def __init__(
        self,
        node: PureWorker,
        step: Step,
        grammars: Grammars,
        cache: PagedCache,
        links: Links,
        card: Register,
        *,
        shutdown_timeout_s: float,
    ) -> None:
        self._node = node
        self._step = step
        self._grammars = grammars
        self._gate = GrammarGate()
        self._in_use = GrammarsInUse(grammars)
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._cache = cache
        self._links = links
        links.computing = self._step_wants_our_cores
        self._card = card
        self._shutdown_timeout_s = shutdown_timeout_s
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._step_started: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._registered = asyncio.Event()
        self._changed = asyncio.Event()  # something ended: whoever waits for idleness looks again
        self._failure: asyncio.Future[None] | None = None
        self._heartbeat_interval_s = 0.5
        self._answered_at = time.monotonic()
        self._asked_to_stop = asyncio.Event()
        self._drain_until = float("inf")
        self._signalled = self._stop_at_once = False

    # ------------------------------------------------------------ life

    async def run(self, coordinator: str) -> None:
        """Serves until `stop` or a Drain; then drains. Raises StartupError when the coordinator refuses this worker."""
        self._failure = asyncio.get_running_loop().create_future()
        self._links.start(coordinator, self._from_coordinator, self._from_peer, self._block, self._peer_gone)
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(self._asked_to_stop.wait())
        try:
            ends: set[asyncio.Future[Any]] = {beating, stopping, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if beating.done():
                beating.result()
            await self._drain()
        finally:
            beating.cancel()
            stopping.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await self._links.close()
            self._model_thread.shutdown(wait=False, cancel_futures=True)
            self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """A signal: the first one drains, a second one stops at once."""
        self._stop_at_once, self._signalled = self._signalled, True
        self._begin_drain(self._shutdown_timeout_s)

    def _begin_drain(self, deadline_s: float) -> None:
        """Asked again, the earliest of all deadlines counts: a Drain is said until heartbeats show that it arrived."""
        self._drain_until = min(self._drain_until, time.monotonic() + deadline_s)
        self._asked_to_stop.set()
        self._changed.set()

    def _time_left_s(self) -> float:
        return max(0.0, self._drain_until - time.monotonic())

    async def _drain(self) -> None:
        """No new work; what runs gets its time, what is left then is aborted, so that it goes on elsewhere."""
        self._node.draining = True
        for message, sender in self._gate.let_all_go():
            self._hand(message, sender)
        self._send_heartbeat()
        left = len(self._node.live_keys())
        log.info("draining; requests under way: %d, %.1f s at most for them", left, self._time_left_s())
        while not self._node.idle and not self._stop_at_once:
            left_s = self._time_left_s()
            if left_s <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(0.5, left_s))
            except TimeoutError:
                self._send_heartbeat()
        for key in self._node.live_keys():
            self._carry_out(self._node.abort(key, "the worker shuts down", time.monotonic()))
        self._carry_out(self._node.turn(time.monotonic()))
        self._send_heartbeat()

    async def _beat(self) -> None:
        """Heartbeats; while they stay unanswered, registrations too: the coordinator may be another one by now."""
        while True:
            if self._registered.is_set():
                self._send_heartbeat()
                self._notice_silence()
                await asyncio.sleep(self._heartbeat_interval_s)
            else:
                self._links.to_coordinator(self._card)
                try:
                    await asyncio.wait_for(self._registered.wait(), REGISTER_AGAIN_S)
                except TimeoutError:
                    log.info("waiting for the coordinator")
                    if time.monotonic() - self._answered_at > SILENCE_S:
                        self._connect_again()

    def _notice_silence(self) -> None:
        silent_s = time.monotonic() - self._answered_at
        if silent_s > SILENCE_S:
            log.warning(
                "the coordinator has not answered for %.1f s; connecting and registering again", silent_s
            )
            self._registered.clear()
            self._connect_again()

    def _connect_again(self) -> None:
        self._answered_at = time.monotonic()
        self._links.reconnect_control()

    def _send_heartbeat(self) -> None:
        started = self._step_started
        age_s = 0.0 if started is None else time.monotonic() - started
        self._links.to_coordinator(self._node.heartbeat(age_s))
        self._in_use.still_there(self._node.live_keys())

    # ------------------------------------------------------------ coming in

    def _from_coordinator(self, message: Message, sender: Sender) -> None:
        match message:
            case Registered():
                self._answered_at = time.monotonic()
                self._heartbeat_interval_s = message.heartbeat_interval_s
                self._links.connect_fronts(message.fronts)
                if not self._registered.is_set():
                    self._say_limit(message.max_model_len)
                self._registered.set()
            case RegistrationRefused():
                self._refused(message)
            case HeartbeatAck():
                self._answered_at = time.monotonic()
                if not message.known:
                    self._registered.clear()
                    self._links.to_coordinator(self._card)
                for key in message.abort:
                    self._carry_out(
                        self._node.abort(key, "the coordinator does not want it", time.monotonic())
                    )
            case Drain():
                self._begin_drain(message.deadline_s)
            case _:
                self._take(message, WorkerId(sender.name))
        self._turn()

    def _step_wants_our_cores(self) -> bool:
        """One on a device leaves them to us."""
        return self._step_started is not None and self._card.device == "cpu"

    def _say_limit(self, tokens: int) -> None:
        log.info("registered; longest prompt and answer together: %d tokens", tokens)
        if tokens < self._card.max_model_len:
            log.warning(
                "that is less than the %d tokens that this worker's model takes: some worker's pool is smaller "
                "(--kv-cache-memory, --num-kv-blocks), or its --max-model-len",
                self._card.max_model_len,
            )

    def _refused(self, message: RegistrationRefused) -> None:
        if self._failure is None or self._failure.done():
            return
        reason = (
            f"refused by the coordinator: {message.field} is {message.ours} there and {message.theirs} here; "
            f"{_REMEDIES.get(message.field, _OTHERWISE)}"
        )
        self._failure.set_exception(BadConfiguration(reason))

    def _from_peer(self, message: Message, sender: Sender) -> None:
        """From a prefill worker, or the answer of the decode worker that was spoken to."""
        answer = self._card.role == "prefill"
        self._take(message, WorkerId(sender.name) if answer else peer_of(sender))
        self._turn()

    def _peer_gone(self, worker: WorkerId) -> None:
        self._carry_out(self._node.peer_gone(worker, time.monotonic()))
        self._turn()

    def _take(self, message: Message, sender: WorkerId) -> None:
        """Hands it to the worker, now or when its grammar is compiled."""
        now = time.monotonic()
        passes, effects = self._gate.arrived(message, sender, self._grammars.is_compiled, now)
        self._carry_out(effects)
        if passes:
            self._hand(message, sender)
        for grammar in self._gate.wanted():
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._grammar_thread, self._grammars.compile, grammar)
            done.add_done_callback(functools.partial(self._compiled, grammar))

    def _hand(self, message: Message, sender: WorkerId) -> None:
        """To the worker. If that raises, we erred: what the message is about fails at once, and the worker lives."""
        now = time.monotonic()
        self._in_use.handed_on(message)
        try:
            effects = self._node.handle(message, sender, now)
        except Exception as error:
            if not isinstance(message, AboutRequest):
                raise
            effects = self._blame(message.key, error, now)
        self._carry_out(effects)

    def _blame(self, key: Key, error: Exception, now: float) -> list[Effect]:
        log.error("request %s fails: a message about it could not be handled", key[0], exc_info=error)
        return self._node.fail(key, error, now)

    def _compiled(self, grammar: Grammar, future: asyncio.Future[str | None]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            log.error("a grammar's compile raised", exc_info=error)
        fault = future.result() if error is None else "could not be compiled here"
        released, effects = self._gate.compiled(grammar, fault)
        self._carry_out(effects)
        for message, sender in released:
            self._hand(message, sender)
        self._turn()

    def _block(self, header: Block, sender: Sender, source: memoryview) -> None:
        worker, now = peer_of(sender), time.monotonic()
        try:
            place = self._node.place(header, worker)
            good = place is None or store(self._cache, place, source, header)
            self._node.block(header, worker, good, now)
        except Exception as error:
            self._carry_out(self._blame(header.key, error, now))
        self._turn()

    # ------------------------------------------------------------ one turn

    def _turn(self) -> None:
        now = time.monotonic()
        if self._step_started is None:
            batch = self._node.schedule(now)
            if batch is not None:
                self._step_started = now
                loop = asyncio.get_running_loop()
                done = loop.run_in_executor(self._model_thread, self._step, batch)
                done.add_done_callback(lambda future: self._step_done(batch, future))
        self._carry_out(self._node.turn(now) + self._gate.expire(now))
        self._set_timer(now)
        self._changed.set()

    def _step_done(self, batch: Batch, future: asyncio.Future[tuple[Seq[RowResult], dict[int, str]]]) -> None:
        if future.cancelled():
            return
        now = time.monotonic()
        assert self._step_started is not None
        step_s, self._step_started = now - self._step_started, None
        results, failed = future.result()
        effects: list[Effect] = []
        for index, reason in failed.items():
            effects += self._node.fail_row(batch.rows[index], reason, now)
        self._carry_out(effects + self._node.finish(batch, results, step_s, now))
        self._turn()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = (self._node.next_deadline(), self._gate.next_deadline())
        deadline = min((time for time in deadlines if time is not None), default=None)
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, deadline - now), self._turn)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToFront(front, message):
                    self._links.to_front(front, message)
                case ToCoordinator(message):
                    self._links.to_coordinator(message)
                case ToReceiver(target, message):
                    self._links.to_receiver(target, message)
                case ToSender(worker, message):
                    self._links.to_sender(worker, message)
                case SendBlock(target, key, index, block):
                    self._links.send_block(target, key, index, block)
