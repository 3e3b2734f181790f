"""The coordinator without its sockets: who gets which request, and what happens when somebody goes. Pure.

    Submit ─▶ WAITING in the queue ─ a pair of workers has room ─▶ dispatched as attempt n ─▶ QUEUED
      ─ first token at the front ─▶ PREFILLING is over ─ Started from the decode worker ─▶ DECODING ─▶ FINISHED
    A worker lost, a failure, a gap in the tokens, or nobody who holds the attempt ─▶ WAITING, attempt n + 1,
      from the tokens the front has accepted; the old attempt is fenced. A decode worker lost before the hand-over
      only costs a Rebind.

Reconciliation is by level: every heartbeat lists what its worker holds. What it holds and should not is aborted
by the answer; what somebody should hold and nobody lists for `unheld_after_s` is dispatched again. Lost
messages, orphans and a restart of this process all come down to that.

This file hears: what the front says, what workers say, what time it is. What then becomes of a request is decided
in `attempts.py`, which worker gets it in `dispatcher.py`.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from common.counters import Counters
from common.effects import Effect, ToWorker
from common.errors import told
from common.front_messages import CancelRequest, Progress, RequestFinished, StopRequest, Submit
from common.lifecycle import Phase
from common.messages import (
    AboutRequest,
    Accepted,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Later,
    Message,
    Rebind,
    Refused,
    Register,
    Sender,
    Started,
    Stop,
    Tokens,
)
from common.ordering import name_of
from common.request import Attempt, Incarnation, Key, RequestId, WorkerId
from coordinator.admission import Admission
from coordinator.attempts import Attempts
from coordinator.departures import SILENT, Departures
from coordinator.dispatcher import Dispatcher
from coordinator.forecast import Forecaster
from coordinator.intake import Intake
from coordinator.lost_tokens import LostTokens
from coordinator.placing import Placing
from coordinator.queue import WaitingQueue
from coordinator.registrations import Registrations
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.targets import Targets
from coordinator.tracker import Tracked, Tracker


class Cluster:
    def __init__(
        self,
        registry: Registry,
        queue: WaitingQueue,
        *,
        first_attempt: Attempt,
        max_wait_s: float = 120.0,
        ask_again_s: float = 1.0,
        unheld_after_s: float = 2.5,
        targets: Mapping[str, Targets] | None = None,
        local_prefill: bool = False,
        refuse_late: bool = True,
    ) -> None:
        """`targets` of tiers, by name. `local_prefill`: decode workers may compute prompts beside prefill workers.
        `refuse_late`: what is not likely to have its first token in time is refused at once."""
        self.registry = registry
        self.queue = queue
        self.tracker = Tracker()
        self.counters = Counters()
        router = Router()
        self._placing = Placing(registry, router, targets=targets or {}, local_prefill=local_prefill)
        self._dispatcher = Dispatcher(
            registry,
            queue,
            self.tracker,
            router,
            self._placing,
            first_attempt=first_attempt,
            ask_again_s=ask_again_s,
        )
        self._lost_tokens = LostTokens(self.tracker, self.counters)
        self._attempts = Attempts(
            registry,
            queue,
            self.tracker,
            self._dispatcher,
            self._placing,
            self._lost_tokens,
            self.counters,
            max_wait_s=max_wait_s,
            ask_again_s=ask_again_s,
            unheld_after_s=unheld_after_s,
        )
        self.notices: deque[str] = deque(maxlen=256)
        """For the log of whoever drives this; to be cleared by it."""
        self.departures = Departures(registry, self.tracker, self._attempts, self.counters, self.notices)
        self._registrations = Registrations(
            registry, self.departures, self.counters, self.notices, name_of(queue.policy)
        )
        self._forecaster = Forecaster(queue, self.tracker, router, self._placing)
        admission = Admission(
            registry, queue, self._dispatcher, self._placing, self._forecaster, refuse_late=refuse_late
        )
        self._intake = Intake(admission, self.tracker, self._dispatcher, self._attempts, self.counters)
        self._max_wait_s = max_wait_s
        self._ask_again_s = ask_again_s
        self._next_look = 0.0
        self.draining = False

    # ------------------------------------------------------------ from the front

    def submit(self, message: Submit, now: float) -> list[Effect]:
        """Admits a group of requests into the queue or rejects it at once, whole."""
        said = self._intake.submit(message, now, draining=self.draining)
        return said + self._dispatcher.give_out(now)

    def from_front(self, message: Message, now: float) -> list[Effect]:
        """What the front saw or its client did; whoever waits gets the room that this makes."""
        return self._on_front(message, now) + self._dispatcher.give_out(now)

    def _on_front(self, message: Message, now: float) -> list[Effect]:
        match message:
            case Progress():
                return self._progress(message, now)
            case RequestFinished():
                return self._finished(message.id, now)
            case StopRequest():
                return self._stopped(message.id, now)
            case CancelRequest():
                return self._cancelled(message, now)
        raise AssertionError(f"not a front's message: {type(message).__name__}")

    def _progress(self, message: Progress, now: float) -> list[Effect]:
        """Over one row we may err: that must not cost the others their tokens."""
        effects: list[Effect] = []
        decoding, get, served = Phase.DECODING, self.tracker.get, self._dispatcher.served
        for request_id, first, ids in message.rows:
            tracked = get(request_id)
            if tracked is None:
                continue
            try:
                outputs = tracked.outputs
                assert first == len(outputs)
                if not tracked.prompt_done:
                    if not first:
                        self._first_token(tracked, now)
                    self._attempts.prompt_done(tracked, now)
                elif tracked.life.phase is not decoding:
                    if first == 1 and tracked.prefill is not None:
                        self._placing.gaps.add(now - tracked.first_token_at)
                    self._attempts.token_came(tracked, now)
            except Exception as error:
                effects += self._fault(tracked.key, error, now)
                continue
            outputs += ids
            served(tracked, len(ids))
            tracked.fruitless = 0
            tracked.seen_at = now
        for key in message.gaps:
            tracked = self.tracker.present(key)
            if tracked is not None:
                effects += self._attempts.again(tracked, "tokens were lost on the way to the front", now)
        return effects

    def _first_token(self, tracked: Tracked, now: float) -> None:
        tracked.first_token_at, tracked.deadline = now, None
        self._forecaster.came(tracked, now)

    def _finished(self, request_id: RequestId, now: float) -> list[Effect]:
        tracked = self.tracker.get(request_id)
        return [] if tracked is None else self._attempts.end(tracked, Phase.FINISHED, now)

    def _stopped(self, request_id: RequestId, now: float) -> list[Effect]:
        tracked = self.tracker.get(request_id)
        if tracked is None:
            return []
        said: list[Effect] = [ToWorker(worker, Stop(*tracked.key)) for worker in tracked.holders]
        return said + self._attempts.end(tracked, Phase.FINISHED, now)

    def _cancelled(self, message: CancelRequest, now: float) -> list[Effect]:
        tracked = self.tracker.get(message.id)
        if tracked is None:
            return []
        self.counters.add("requests_aborted_total", phase=str(tracked.life.phase))
        said = self._attempts.abort_holders(tracked, message.reason)
        return said + self._attempts.end(tracked, Phase.ABORTED, now)

    # ------------------------------------------------------------ from workers

    def from_worker(self, message: Message, sender: Sender, now: float) -> list[Effect]:
        """Anything a worker says on its control link. If handling it raises, we erred: the request that it is about
        fails at once, and everything else goes on."""
        try:
            effects = self._on_worker(message, sender, now)
        except Exception as error:
            if not isinstance(message, AboutRequest):
                raise
            effects = self._fault(message.key, error, now)
        return effects + self._dispatcher.give_out(now)

    def _on_worker(self, message: Message, sender: Sender, now: float) -> list[Effect]:
        worker_id = WorkerId(sender.name)
        match message:
            case Register():
                self._dispatcher.room_made = True
                return self._registrations.hear(message, sender, now)
            case Heartbeat():
                return self._heartbeat(message, sender, now)
        if self.registry.get(worker_id, sender.incarnation) is None:
            self._late(message)
            return []
        match message:
            case Ended():
                return self._ended(message, worker_id, now)
            case Accepted() | Later() | Refused() | Started():
                return self._about_attempt(message, worker_id, now)
        self._late(message)
        return []

    def hear_tokens(
        self, tokens: Tokens, worker_id: WorkerId, now: float
    ) -> tuple[Tokens, int, list[Effect]]:
        """To be asked before a front takes them: what of them is this worker's to say, how many rows are not, and the
        ends, to be carried out first, of requests whose first token comes after its deadline: it is not shown."""
        tokens, dropped, late = self.tracker.of_holder(tokens, worker_id, now)
        if not late:
            return tokens, dropped, []
        effects = [one for tracked in late for one in self._attempts.first_too_late(tracked, now)]
        return tokens, dropped, effects + self._dispatcher.give_out(now)

    def worker_died(self, worker_id: WorkerId, incarnation: Incarnation, now: float) -> list[Effect]:
        """Its process is known to be gone: nobody need wait for heartbeats. Idempotent."""
        worker = self.registry.get(worker_id, incarnation)
        if worker is None:
            return []
        worker.ended, worker.overdue = True, False
        if worker.lost:
            return []
        self.registry.mark_lost(worker)
        return self.departures.lost(worker, "died", now) + self._dispatcher.give_out(now)

    def _heartbeat(self, message: Heartbeat, sender: Sender, now: float) -> list[Effect]:
        worker_id = WorkerId(sender.name)
        worker = self.registry.heartbeat(message, sender, now)
        if worker is None:
            return [ToWorker(worker_id, HeartbeatAck(known=False))]
        unwanted: list[Key] = []
        faults: list[Effect] = []
        for request_id, attempt, phase in message.live:
            tracked = self.tracker.present((request_id, attempt))
            if tracked is None or worker_id not in (tracked.prefill, tracked.decode):
                unwanted.append((request_id, attempt))
            else:
                tracked.seen_at = now
                try:
                    self._attempts.worker_says(tracked, worker_id, phase, now)
                except Exception as error:
                    faults += self._fault(tracked.key, error, now)
        again = [] if message.draining else self.departures.say_drain(worker, now)
        return [ToWorker(worker_id, HeartbeatAck(known=True, abort=tuple(unwanted))), *again, *faults]

    def _about_attempt(
        self, message: Accepted | Later | Refused | Started, worker_id: WorkerId, now: float
    ) -> list[Effect]:
        tracked = self.tracker.present(message.key)
        if tracked is None or worker_id not in tracked.holders:
            self._late(message)
            return []
        tracked.seen_at = now
        match message:
            case Accepted():
                return self._accepted(tracked, message, now)
            case Later():
                return self._later(tracked, message, now)
            case Refused():
                tracked.avoid.add(worker_id)
                return self._attempts.again(tracked, f"{worker_id} refused: {message.reason}", now)
            case Started():
                self._attempts.worker_says(tracked, worker_id, message.phase, now)
        return []

    def _accepted(self, tracked: Tracked, message: Accepted, now: float) -> list[Effect]:
        """By level: what counts is not which command this answers, but whether the worker has our target."""
        holds = None if message.target is None else (message.target.worker, message.target.incarnation)
        target = self.registry.get(tracked.decode) if tracked.decode is not None else None
        if holds is None or target is None or tracked.handed_over or holds == (target.id, target.incarnation):
            tracked.command = None
            return []
        if isinstance(tracked.command, Rebind):
            return []  # an older answer: ours is on its way, or is sent again
        return self._dispatcher.command(tracked, Rebind(*tracked.key, target.card.address), now)

    def _later(self, tracked: Tracked, message: Later, now: float) -> list[Effect]:
        """The worker has no room after all: it is asked again, for as long as a request may wait at all."""
        if now - tracked.dispatched_at >= self._max_wait_s:
            tracked.avoid.update(tracked.holders[:1])
            return self._attempts.again(tracked, "the worker had no room", now)
        tracked.ask_at = now + min(message.retry_after_s, self._ask_again_s)
        tracked.asks = 0
        return []

    def _ended(self, message: Ended, worker_id: WorkerId, now: float) -> list[Effect]:
        self.tracker.remember_end(worker_id, message)
        self._lost_tokens.ended(worker_id, message)
        tracked = self.tracker.present(message.key)
        if tracked is None or worker_id not in tracked.holders:
            return []
        tracked.seen_at = now
        tracked.command = None
        if message.outcome == "handed_over":
            if not tracked.handed_over:  # its word may come before the decode worker's own
                self._attempts.owned(tracked, now)
            return []
        if message.outcome in ("finished", "unknown"):
            return []  # the front has the last token, or `unheld_after_s` finds out that it has not
        if tracked.handed_over and worker_id == tracked.prefill and worker_id != tracked.decode:
            return []  # the decode worker's start beats the prefill worker's failure
        if not message.retryable:
            said = self._attempts.abort_holders(tracked, message.reason)
            return said + self._attempts.fail(
                tracked, "RequestFailed", f"it cannot be computed: {message.reason}", now
            )
        if message.outcome == "failed":  # whichever end of the pair it was: another one, if there is one
            tracked.avoid.update(tracked.holders)
        return self._attempts.again(tracked, f"{worker_id}: {message.reason or message.outcome}", now)

    def _late(self, message: Message) -> None:
        self.counters.add("late_messages_total", kind=type(message).__name__)

    # ------------------------------------------------------------ every turn

    def turn(self, now: float) -> list[Effect]:
        """Deaths, deadlines, unanswered commands, unheld requests, and the queue."""
        effects: list[Effect] = []
        for worker in self.registry.expire(now):
            effects += self.departures.lost(worker, SILENT, now)
        self.departures.look(now)
        if now >= self._next_look:
            self._next_look = now + self._ask_again_s / 4
            self._dispatcher.room_made = True
            for tracked in self.tracker.dispatched():
                effects += self._attempts.look_after(tracked, now)
            effects += self._attempts.overdue(now)
        return effects + self._dispatcher.give_out(now)

    def next_deadline(self, now: float) -> float | None:
        """When `turn` must be called at the latest; None while there is nothing to watch."""
        if len(self.tracker):
            return max(now, self._next_look)
        return now + 0.5 if self.registry.awaits else None

    # ------------------------------------------------------------ when we err

    def _fault(self, key: Key, error: Exception, now: float) -> list[Effect]:
        """This attempt's request fails now, and nothing else does."""
        self.counters.add("internal_errors_total")
        tracked = self.tracker.present(key)
        if tracked is None:
            return []
        where = "".join(traceback.format_exception(error))
        self.notices.append(f"request {tracked.id} fails by a fault of ours: {where}")
        said = self._attempts.abort_holders(tracked, "a fault of ours")
        return said + self._attempts.fail(tracked, "RequestFailed", f"a fault of ours, {told(error)}", now)

    # ------------------------------------------------------------ questions

    @property
    def settled(self) -> bool:
        """Nothing waits, runs, or takes a share of any worker."""
        return len(self.tracker) == 0 and len(self.queue) == 0 and self._dispatcher.idle

    def timeline(self, request_id: RequestId, now: float) -> dict[str, Any] | None:
        return self.tracker.timeline(request_id, now)

    def num_waiting(self) -> int:
        return len(self.queue)

    def num_running(self) -> int:
        return len(self.tracker) - len(self.queue)
