"""The coordinator without its sockets: who gets which request, and what happens when somebody goes. Pure.

    Submit ─▶ WAITING in the queue ─ a pair of workers has room ─▶ dispatched as attempt n ─▶ QUEUED
      ─ first token at the front ─▶ PREFILLING is over ─ Started from the decode worker ─▶ DECODING ─▶ FINISHED
    A worker lost, a failure, a gap in the tokens, or nobody who holds the attempt ─▶ WAITING, attempt n + 1,
      from the tokens the front has accepted; the old attempt is fenced. A decode worker lost before the hand-over
      only costs a Rebind.

Reconciliation is by level: every heartbeat lists what its worker holds. What it holds and should not is aborted
by the answer; what somebody should hold and nobody lists for `unheld_after_s` is dispatched again. Lost
messages, orphans and a restart of this process all come down to that.

Every wait here has a limit: the queue (`max_wait_s`, or the request's deadline), a command without answer
(`ask_again_s`, MAX_ASKS times), a request without proof of life (`unheld_after_s`), attempts in a row
that bring no token (MAX_FRUITLESS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from common.counters import Counters
from common.effects import Effect, ToFront, ToWorker
from common.lifecycle import REQUEST_MOVES, Phase
from common.messages import (
    Abort,
    Accepted,
    Admitted,
    CancelRequest,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Later,
    Message,
    Progress,
    Rebind,
    Refused,
    Register,
    Registered,
    RegistrationRefused,
    Rejected,
    RequestEnded,
    RequestFinished,
    Sender,
    Started,
    Stop,
    StopRequest,
    Submit,
)
from common.request import Attempt, Incarnation, Key, Request, RequestId, WorkerId
from coordinator.dispatcher import Dispatcher
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry, Worker
from coordinator.tracker import Tracked, Tracker

MAX_FRUITLESS = 5
MAX_ASKS = 4
MAX_DEATHS = 2


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
    ) -> None:
        self.registry = registry
        self.queue = queue
        self.tracker = Tracker()
        self.counters = Counters()
        self._dispatcher = Dispatcher(
            registry, queue, self.tracker, first_attempt=first_attempt, ask_again_s=ask_again_s
        )
        self._max_wait_s = max_wait_s
        self._ask_again_s = ask_again_s
        self._unheld_after_s = unheld_after_s
        self._next_look = 0.0
        self.draining = False
        self.notices: deque[str] = deque(
            maxlen=256
        )  # for the log of whoever drives this; to be cleared by it

    # ------------------------------------------------------------ from the front

    def submit(self, message: Submit, now: float) -> list[Effect]:
        """Admits a group of requests into the queue or rejects it at once, whole."""
        main = message.requests[0]
        rejection = self._rejection(message.requests)
        if rejection is not None:
            self.counters.add("requests_rejected_total", reason=rejection.error)
            return [ToFront(main.front, rejection)]
        deadline = None if message.deadline_s is None else now + message.deadline_s
        for request in message.requests:
            assert self.tracker.get(request.request_id) is None, "request ids are minted once"
            self._dispatcher.enqueue(self.tracker.new(request, deadline, now), now)
        return [ToFront(main.front, Admitted(main.request_id)), *self._dispatcher.give_out(now)]

    def _rejection(self, requests: Sequence[Request]) -> Rejected | None:
        def no(error: str, reason: str, retry_after_s: float = 0.0, code: str = "") -> Rejected:
            return Rejected(requests[0].request_id, error, reason, retry_after_s, code)

        if self.draining:
            return no("NoWorker", "the service is shutting down")
        if any(request.prompt_tokens == 0 for request in requests):
            return no("BadRequest", "the prompt is empty")
        limit = self.registry.max_model_len()
        if limit is None or not self.registry.usable("decode"):
            return no("NoWorker", "no decode worker is ready")
        longest = max(requests, key=lambda request: request.max_total_tokens)
        if longest.max_total_tokens > limit:
            asked = f"{longest.prompt_tokens} prompt tokens and {longest.sampling.max_tokens} output tokens"
            why = f"{asked} do not fit the limit of {limit} tokens"
            return no("BadRequest", why, code="context_length_exceeded")
        tokens = sum(request.prompt_tokens for request in requests)
        never = self.queue.never_fits(len(requests), tokens)
        if never is not None:
            return no("BadRequest", never, code="too_many_choices")
        full = self.queue.full_for(len(requests), tokens)
        return None if full is None else no("NotAdmitted", full, self._dispatcher.retry_after_s())

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
        for request_id, first, ids in message.rows:
            tracked = self.tracker.get(request_id)
            if tracked is None:
                continue
            assert first == len(tracked.outputs)
            if not tracked.prompt_done:
                self._prompt_done(tracked, now)
            tracked.outputs += ids
            tracked.fruitless = 0
            tracked.seen_at = now
        effects: list[Effect] = []
        for key in message.gaps:
            tracked = self.tracker.present(key)
            if tracked is not None:
                effects += self._again(tracked, "tokens were lost on the way to the front", now)
        return effects

    def _prompt_done(self, tracked: Tracked, now: float) -> None:
        """The attempt's first token is out (whatever else was lost on the way)."""
        tracked.prompt_done = True
        self._dispatcher.prompt_done(tracked)
        if tracked.life.phase is Phase.QUEUED:
            tracked.life.move(Phase.PREFILLING, now)
        if tracked.life.phase is Phase.PREFILLING:
            tracked.life.move(Phase.KV_READY if tracked.prefill is not None else Phase.DECODING, now)

    def _finished(self, request_id: RequestId, now: float) -> list[Effect]:
        tracked = self.tracker.get(request_id)
        return [] if tracked is None else self._end(tracked, Phase.FINISHED, now)

    def _stopped(self, request_id: RequestId, now: float) -> list[Effect]:
        tracked = self.tracker.get(request_id)
        if tracked is None:
            return []
        said: list[Effect] = [ToWorker(worker, Stop(*tracked.key)) for worker in tracked.holders]
        return said + self._end(tracked, Phase.FINISHED, now)

    def _cancelled(self, message: CancelRequest, now: float) -> list[Effect]:
        tracked = self.tracker.get(message.id)
        if tracked is None:
            return []
        self.counters.add("requests_aborted_total", phase=str(tracked.life.phase))
        said = self._abort_holders(tracked, message.reason)
        return said + self._end(tracked, Phase.ABORTED, now)

    # ------------------------------------------------------------ from workers

    def from_worker(self, message: Message, sender: Sender, now: float) -> list[Effect]:
        """Anything a worker says on its control link."""
        return self._on_worker(message, sender, now) + self._dispatcher.give_out(now)

    def _on_worker(self, message: Message, sender: Sender, now: float) -> list[Effect]:
        worker_id = WorkerId(sender.name)
        match message:
            case Register():
                return self._register(message, sender, now)
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

    def _register(self, message: Register, sender: Sender, now: float) -> list[Effect]:
        worker_id = WorkerId(sender.name)
        before = self.registry.get(worker_id)
        effects: list[Effect] = []
        if before is not None and not before.lost and before.incarnation > sender.incarnation:
            self._late(message)  # incarnations rise: this life is over, and must not put out the present one
            return [ToWorker(worker_id, _name_taken(before, sender))]
        if before is not None and not before.lost and before.incarnation != sender.incarnation:
            self.registry.mark_lost(before)
            effects += self._worker_lost(before, "was restarted", now)
        answer = self.registry.register(message, sender, now)
        self._note_registration(worker_id, message, answer)
        self._dispatcher.room_made = True
        return [*effects, ToWorker(worker_id, answer)]

    def _note_registration(
        self, worker_id: WorkerId, card: Register, answer: Registered | RegistrationRefused
    ) -> None:
        if isinstance(answer, RegistrationRefused):
            difference = f"its {answer.field} is {answer.theirs}, here it is {answer.ours}"
            self.notices.append(f"{card.role} worker {worker_id} refused: {difference}")
        else:
            self.notices.append(
                f"{card.role} worker {worker_id} registered, process {card.pid} on {card.host}"
            )

    def worker_died(self, worker_id: WorkerId, incarnation: Incarnation, now: float) -> list[Effect]:
        """Its process is known to be gone: nobody need wait for heartbeats. Idempotent."""
        worker = self.registry.get(worker_id, incarnation)
        if worker is None or worker.lost:
            return []
        self.registry.mark_lost(worker)
        return self._worker_lost(worker, "died", now) + self._dispatcher.give_out(now)

    def _heartbeat(self, message: Heartbeat, sender: Sender, now: float) -> list[Effect]:
        worker_id = WorkerId(sender.name)
        if not self.registry.heartbeat(message, sender, now):
            return [ToWorker(worker_id, HeartbeatAck(known=False))]
        unwanted: list[Key] = []
        for request_id, attempt, phase in message.live:
            tracked = self.tracker.present((request_id, attempt))
            if tracked is None or worker_id not in (tracked.prefill, tracked.decode):
                unwanted.append((request_id, attempt))
            else:
                tracked.seen_at = now
                self._advance(tracked, worker_id, phase, now)
        return [ToWorker(worker_id, HeartbeatAck(known=True, abort=tuple(unwanted)))]

    def _advance(self, tracked: Tracked, worker_id: WorkerId, phase: str, now: float) -> None:
        """A worker's phase, by its word or its heartbeat, as far as it is ahead of ours by the table."""
        if phase == Phase.QUEUED:
            return
        if worker_id == tracked.decode and worker_id != tracked.prefill and tracked.prefill is not None:
            if phase != Phase.KV_READY and not tracked.handed_over:  # more than a transfer under way
                self._owned(tracked, now)
        elif tracked.life.phase is Phase.QUEUED:
            tracked.life.move(Phase.PREFILLING, now)

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
                return self._again(tracked, f"{worker_id} refused: {message.reason}", now)
            case Started():
                self._advance(tracked, worker_id, message.phase, now)
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
            return self._again(tracked, "the worker had no room", now)
        tracked.ask_at = now + min(message.retry_after_s, self._ask_again_s)
        tracked.asks = 0
        return []

    def _owned(self, tracked: Tracked, now: float) -> None:
        """The decode worker holds all of it now."""
        tracked.command = None
        tracked.handed_over = True
        self._dispatcher.prompt_done(tracked)
        for phase in (Phase.PREFILLING, Phase.KV_READY, Phase.DECODE_READY, Phase.DECODING):
            if phase in REQUEST_MOVES[tracked.life.phase]:
                tracked.life.move(phase, now)

    def _ended(self, message: Ended, worker_id: WorkerId, now: float) -> list[Effect]:
        self.tracker.remember_end(worker_id, message)
        tracked = self.tracker.present(message.key)
        if tracked is None or worker_id not in tracked.holders:
            return []
        tracked.seen_at = now
        tracked.command = None
        if message.outcome == "handed_over":
            if not tracked.handed_over:  # its word may come before the decode worker's own
                self._owned(tracked, now)
            return []
        if message.outcome in ("finished", "unknown"):
            return []  # the front has the last token, or `unheld_after_s` finds out that it has not
        if tracked.handed_over and worker_id == tracked.prefill and worker_id != tracked.decode:
            return []  # the decode worker's start beats the prefill worker's failure
        if not message.retryable:
            said = self._abort_holders(tracked, message.reason)
            return said + self._fail(
                tracked, "RequestFailed", f"it cannot be computed: {message.reason}", now
            )
        if message.outcome == "failed":  # whichever end of the pair it was: another one, if there is one
            tracked.avoid.update(tracked.holders)
        return self._again(tracked, f"{worker_id}: {message.reason or message.outcome}", now)

    def _late(self, message: Message) -> None:
        self.counters.add("late_messages_total", kind=type(message).__name__)

    # ------------------------------------------------------------ every turn

    def turn(self, now: float) -> list[Effect]:
        """Deaths, deadlines, unanswered commands, unheld requests, and the queue."""
        effects: list[Effect] = []
        for worker in self.registry.expire(now):
            effects += self._worker_lost(worker, "stopped answering", now)
        if now >= self._next_look:
            self._next_look = now + self._ask_again_s / 4
            self._dispatcher.room_made = True
            for tracked in self.tracker.all():
                effects += self._look_after(tracked, now)
        return effects + self._dispatcher.give_out(now)

    def next_deadline(self, now: float) -> float | None:
        """When `turn` must be called at the latest; None while there is nothing to watch."""
        if len(self.tracker):
            return max(now, self._next_look)
        return now + 0.5 if self.registry.live() else None

    def _look_after(self, tracked: Tracked, now: float) -> list[Effect]:
        if tracked.life.phase is Phase.WAITING:
            return self._out_of_time(tracked, now)
        if tracked.deadline is not None and now >= tracked.deadline and not tracked.outputs:
            said = self._abort_holders(tracked, "deadline")
            return said + self._fail(
                tracked, "DeadlinePassed", "its deadline passed before the first token", now
            )
        if tracked.command is not None:
            return self._ask_again(tracked, now)
        if now - tracked.seen_at >= self._unheld_after_s:
            tracked.avoid.update(tracked.holders)  # it may have fallen silent and not be given up yet
            return self._again(tracked, "no worker holds it any more", now)
        return []

    def _out_of_time(self, tracked: Tracked, now: float) -> list[Effect]:
        """A deadline is for the first token; who has that waits as long as anybody may."""
        waited_s = tracked.life.seconds_in(Phase.WAITING, now)
        late = tracked.deadline is not None and now >= tracked.deadline and not tracked.outputs
        if not late and waited_s < self._max_wait_s:
            return []
        reason = f"no worker took it within {waited_s:.1f} s"
        return self._fail(tracked, "RequestFailed" if tracked.outputs else "DeadlinePassed", reason, now)

    def _ask_again(self, tracked: Tracked, now: float) -> list[Effect]:
        if now < tracked.ask_at:
            return []
        if tracked.asks >= MAX_ASKS:
            tracked.avoid.update(tracked.holders[:1])
            return self._again(tracked, "the worker did not answer the dispatch", now)
        tracked.asks += 1
        tracked.ask_at = now + self._ask_again_s
        assert tracked.command is not None
        return [ToWorker(tracked.holders[0], tracked.command)]

    # ------------------------------------------------------------ when something goes

    def _worker_lost(self, worker: Worker, how: str, now: float) -> list[Effect]:
        self.counters.add("workers_lost_total", role=worker.role)
        self.notices.append(f"{worker.role} worker {worker.id} {how}")
        effects: list[Effect] = []
        for tracked in self.tracker.dispatched():
            if worker.id not in tracked.holders or (tracked.handed_over and worker.id != tracked.decode):
                continue
            effects += self._lost_holder(tracked, worker, how, now)
        return effects

    def _lost_holder(self, tracked: Tracked, worker: Worker, how: str, now: float) -> list[Effect]:
        if worker.id == tracked.decode and tracked.prefill is not None and not tracked.handed_over:
            return self._rebind(tracked, worker, how, now)
        tracked.avoid.add(worker.id)
        if tracked.life.phase is not Phase.QUEUED:  # what only stood in line there cannot have killed it
            tracked.deaths += 1
        if tracked.deaths >= MAX_DEATHS:
            reason = f"{tracked.deaths} workers were lost while running it, the last one {worker.id}"
            said = self._abort_holders(tracked, reason)
            return said + self._fail(tracked, "RequestFailed", reason, now)
        return self._again(tracked, f"{worker.id} {how}", now)

    def _rebind(self, tracked: Tracked, lost: Worker, how: str, now: float) -> list[Effect]:
        """The prefill worker still has every block: only the destination changes."""
        tracked.avoid.add(lost.id)
        rebound = self._dispatcher.rebind(tracked, now)
        if rebound is None:
            return self._again(tracked, f"{lost.id} {how}", now)
        tracked.last_fault = f"{lost.id} {how}"
        return rebound

    def _again(self, tracked: Tracked, why: str, now: float) -> list[Effect]:
        """Back to the queue with what the front has; the present attempt is told to end."""
        tracked.last_fault = why
        said = self._abort_holders(tracked, why)
        tracked.fruitless += 1
        if tracked.fruitless >= MAX_FRUITLESS:
            stage = f"given up in {tracked.life.phase} after {tracked.fruitless} attempts without a token"
            return said + self._fail(tracked, "RequestFailed", f"{stage}: {why}", now)
        self.counters.add("requests_migrated_total")
        self._dispatcher.take_back(tracked)
        tracked.life.move(Phase.WAITING, now)
        self._dispatcher.enqueue(tracked, now)
        return said

    def _abort_holders(self, tracked: Tracked, reason: str) -> list[Effect]:
        return [ToWorker(worker, Abort(*tracked.key, reason)) for worker in tracked.holders]

    def _fail(self, tracked: Tracked, error: str, reason: str, now: float) -> list[Effect]:
        ended = RequestEnded(tracked.id, error, reason)
        return [ToFront(tracked.request.front, ended), *self._end(tracked, Phase.FAILED, now)]

    def _end(self, tracked: Tracked, phase: Phase, now: float) -> list[Effect]:
        """The one end of a request."""
        if tracked.life.phase is Phase.WAITING:
            self.queue.remove(tracked.id)
        self._dispatcher.release(tracked)
        tracked.life.move(phase, now)
        self.tracker.end(tracked)
        return []

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


def _name_taken(holder: Worker, sender: Sender) -> RegistrationRefused:
    return RegistrationRefused(
        "worker_id", f"{sender.name}, taken by process {holder.card.pid}", f"{sender.name} too"
    )
