"""A worker's loop: drives a pure worker with sockets, a clock and the thread that runs the model.

Event-driven, no polling: after each message, frame, finished step or deadline comes one turn: begin a step if none is
out, then carry out what the worker wants said. Steps run in a thread of their own, which also decides the next one
(`stepping.py`); messages are taken, blocks copied and rows sent while it computes. Every callback here that touches the
worker holds the lock that keeps the two apart. Heartbeats leave from this loop and carry the age of the step that is
out, so a hung kernel does not look healthy.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from common.effects import (
    Effect,
    SendBlocks,
    ToCoordinator,
    ToFront,
    ToReceiver,
    ToSender,
    gathered,
)
from common.messages import (
    AboutRequest,
    Drain,
    HeartbeatAck,
    Message,
    Register,
    Registered,
    RegistrationRefused,
    Sender,
    SetRole,
)
from common.request import Grammar, Key, WorkerId
from common.roles import other_role
from kernels.cache import PagedCache
from transfer.channel import Arrived, store_wanted
from transfer.grammar_gate import GrammarGate
from transfer.grammars_in_use import GrammarsInUse, Holds
from transfer.links import Links, peer_of
from transfer.pure_worker import Launch, PureWorker, Step
from transfer.registration import Registration, why_refused
from transfer.stepping import Stepping

log = logging.getLogger(__name__)


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
        launch: Launch | None = None,
    ) -> None:
        """`launch`: for a node that has two batches out, in place of `step`."""
        self._node = node
        self._stepping = Stepping(node, step, self._tell_loop, launch)
        self._lock = self._stepping.lock
        self._grammars = grammars
        self._gate = GrammarGate()
        self._in_use = GrammarsInUse(grammars)
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._cache = cache
        self._links = links
        links.computing = self._step_wants_our_cores
        self._card = card
        self._registration = Registration(links, card, self._send_heartbeat)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # something ended: whoever waits for idleness looks again
        self._failure: asyncio.Future[None] | None = None
        self._asked_to_stop = asyncio.Event()
        self._drain_until = float("inf")
        self._signalled = self._stop_at_once = self._told_to_change = False

    # ------------------------------------------------------------ life

    async def run(self, coordinator: str) -> None:
        """Serves until `stop`, a Drain or a SetRole; then drains. Raises StartupError when the coordinator refuses this
        worker."""
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._links.start(coordinator, self._from_coordinator, self._from_peer, self._blocks, self._peer_gone)
        beating = asyncio.create_task(self._registration.keep())
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
            self._stepping.end()
            await self._links.close()
            self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """A signal: the first one drains, a second one stops at once."""
        self._stop_at_once, self._signalled = self._signalled, True
        self._begin_drain(self._shutdown_timeout_s)

    @property
    def changes_role(self) -> bool:
        """After `run`: it left in order to come back in the other role. Who is signalled leaves for good."""
        return self._told_to_change and not self._signalled

    def _begin_drain(self, deadline_s: float) -> None:
        """Asked again, the earliest of all deadlines counts: a Drain is said until heartbeats show that it arrived."""
        self._drain_until = min(self._drain_until, time.monotonic() + deadline_s)
        self._asked_to_stop.set()
        self._changed.set()

    def _time_left_s(self) -> float:
        return max(0.0, self._drain_until - time.monotonic())

    async def _drain(self) -> None:
        """No new work; what runs gets its time, what is left then is aborted, so that it goes on elsewhere."""
        with self._lock:
            self._node.draining = True
            for message, sender in self._gate.let_all_go():
                self._hand(message, sender)
            self._send_heartbeat()
            left = len(self._node.live_keys())
        why = (
            f"draining, to come back in the {other_role(self._card.role)} role"
            if self._told_to_change
            else "draining"
        )
        log.info("%s; requests under way: %d, %.1f s at most for them", why, left, self._time_left_s())
        while not self._node.idle and not self._stop_at_once:
            left_s = self._time_left_s()
            if left_s <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(0.5, left_s))
            except TimeoutError:
                self._send_heartbeat()
        with self._lock:
            for key in self._node.live_keys():
                self._carry_out(self._node.abort(key, "the worker shuts down", time.monotonic()))
            self._carry_out(self._node.turn(time.monotonic()))
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        with self._lock:
            started = self._stepping.started
            age_s = 0.0 if started is None else time.monotonic() - started
            self._links.to_coordinator(self._node.heartbeat(age_s))
            self._in_use.still_there(self._node.live_keys())

    # ------------------------------------------------------------ coming in

    def _from_coordinator(self, message: Message, sender: Sender) -> None:
        with self._lock:
            self._hear_coordinator(message, sender)
            self._turn()

    def _hear_coordinator(self, message: Message, sender: Sender) -> None:
        match message:
            case Registered():
                self._registration.accepted(message)
            case RegistrationRefused():
                if self._failure is not None and not self._failure.done():
                    self._failure.set_exception(why_refused(message))
            case HeartbeatAck():
                self._registration.answered(message)
                for key in message.abort:
                    self._carry_out(
                        self._node.abort(key, "the coordinator does not want it", time.monotonic())
                    )
            case Drain():
                self._begin_drain(message.deadline_s)
            case SetRole():
                if message.role != self._card.role:
                    self._told_to_change = True
                    self._begin_drain(message.deadline_s)
            case _:
                self._take(message, WorkerId(sender.name))

    def _step_wants_our_cores(self) -> bool:
        """One on a device leaves them to us."""
        return self._stepping.started is not None and self._card.device == "cpu"

    def _from_peer(self, message: Message, sender: Sender) -> None:
        """From a prefill worker, or the answer of the decode worker that was spoken to."""
        answer = self._card.role == "prefill"
        with self._lock:
            self._take(message, WorkerId(sender.name) if answer else peer_of(sender))
            self._turn()

    def _peer_gone(self, worker: WorkerId) -> None:
        with self._lock:
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
        with self._lock:
            released, effects = self._gate.compiled(grammar, fault)
            self._carry_out(effects)
            for message, sender in released:
                self._hand(message, sender)
            self._turn()

    def _blocks(self, sender: Sender, came: Seq[Arrived]) -> None:
        """What is wanted of them is copied and checked in one call; then the worker hears of each."""
        worker, now = peer_of(sender), time.monotonic()
        with self._lock:  # between asking for a place and filling it no other step may be decided
            try:
                self._store(came, worker, now)
            except Exception:  # it does not say over which, and the worker has heard of none: each alone
                for one in came:
                    try:
                        self._store([one], worker, now)
                    except Exception as error:
                        self._carry_out(self._blame(one[0].key, error, now))
            self._turn()

    def _store(self, came: Seq[Arrived], worker: WorkerId, now: float) -> None:
        """Raises only before the worker has heard of any."""
        good = store_wanted(self._cache, came, lambda header: self._node.place(header, worker))
        for (header, _), right in zip(came, good, strict=True):
            try:
                self._node.block(header, worker, right, now)
            except Exception as error:
                self._carry_out(self._blame(header.key, error, now))

    # ------------------------------------------------------------ one turn

    def _turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._stepping.begin(now)
            effects: list[Effect] = []
            try:
                effects = self._node.turn(now) + self._gate.expire(now)
            finally:  # what steps have to say goes out in any case
                self._carry_out(effects)
            self._set_timer(now)
        self._changed.set()
        broken = self._stepping.broken
        if broken is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(broken)

    def _tell_loop(self) -> None:
        """From the model thread: a step is over."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._turn)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = (self._node.next_deadline(), self._gate.next_deadline())
        deadline = min((time for time in deadlines if time is not None), default=None)
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, deadline - now), self._turn)

    def _carry_out(self, effects: list[Effect]) -> None:
        """After what finished steps have to say, which was decided before."""
        for effect in gathered((*self._stepping.take_said(), *effects)):
            match effect:
                case ToFront(front, message):
                    self._links.to_front(front, message)
                case ToCoordinator(message):
                    self._links.to_coordinator(message)
                case ToReceiver(target, message):
                    self._links.to_receiver(target, message)
                case ToSender(worker, message):
                    self._links.to_sender(worker, message)
                case SendBlocks(target, blocks):
                    self._links.send_blocks(target, blocks)
