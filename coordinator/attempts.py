"""What becomes of one request that was admitted: how its attempts go on, fail, are repeated, and its one end. Pure.

Every wait here has a limit: the queue (`max_wait_s`, or the request's deadline), a command without answer
(`ask_again_s`, MAX_ASKS times), a request without proof of life (`unheld_after_s`), attempts in a row
that bring no token (MAX_FRUITLESS).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from common.counters import Counters
from common.effects import Effect, ToFront, ToWorker
from common.front_messages import RequestEnded
from common.lifecycle import LIVE_PHASES, Phase
from common.messages import Abort
from common.request import RequestId, WorkerId
from coordinator.dispatcher import Dispatcher
from coordinator.lost_tokens import LostTokens
from coordinator.placing import Placing
from coordinator.prefixes import chain_of
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry, Worker
from coordinator.tracker import Tracked, Tracker

_ORDER = (Phase.QUEUED, Phase.PREFILLING, Phase.KV_READY, Phase.DECODE_READY, Phase.DECODING)
_BEFORE_THE_BATCH = _ORDER[:3]
MAX_FRUITLESS = 5
MAX_ASKS = 4
MAX_DEATHS = 2


class Attempts:
    def __init__(
        self,
        registry: Registry,
        queue: WaitingQueue,
        tracker: Tracker,
        dispatcher: Dispatcher,
        placing: Placing,
        lost_tokens: LostTokens,
        counters: Counters,
        *,
        max_wait_s: float,
        ask_again_s: float,
        unheld_after_s: float,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._tracker = tracker
        self._dispatcher = dispatcher
        self._placing = placing
        self._lost_tokens = lost_tokens
        self._counters = counters
        self._max_wait_s = max_wait_s
        self._ask_again_s = ask_again_s
        self._unheld_after_s = unheld_after_s
        # When each that waits may have waited too long, the next one first: looking at all of a long queue four times a
        # second would stop every stream meanwhile. Some have been dispatched since, or have ended.
        self._due: list[tuple[float, int, RequestId]] = []

    # ------------------------------------------------------------ how one goes on

    def prompt_done(self, tracked: Tracked, now: float) -> None:
        """The attempt's first token is out (whatever else was lost on the way)."""
        tracked.prompt_done = True
        self._dispatcher.prompt_done(tracked, now)
        self._has_prompt(tracked, tracked.prefill or tracked.decode)
        if tracked.life.phase is Phase.QUEUED:
            tracked.life.move(Phase.PREFILLING, now)
        if tracked.life.phase is Phase.PREFILLING:
            tracked.life.move(Phase.KV_READY if tracked.prefill is not None else Phase.DECODING, now)
        if tracked.prefill is None:
            self._prompt_found_at(tracked, now)

    def owned(self, tracked: Tracked, now: float) -> None:
        """The decode worker holds all of it now."""
        tracked.command = None
        tracked.handed_over = True
        self._dispatcher.prompt_done(tracked, now)
        self._has_prompt(tracked, tracked.decode)
        self._prompt_found_at(tracked, now)
        if tracked.life.phase in _BEFORE_THE_BATCH:
            tracked.life.go(Phase.DECODE_READY, now)

    def worker_says(self, tracked: Tracked, worker: WorkerId, word: str, now: float) -> None:
        """The phase at a worker, by its word or its heartbeat: of two, the one's counts that has the request. A word
        that is behind ours came late; but who is put out of the batch, by that word alone, begins anew."""
        phase = LIVE_PHASES.get(word)
        if phase is None:
            return
        if phase is tracked.life.phase and (tracked.handed_over or tracked.prefill is None):
            return  # as a heartbeat says of nearly all
        if tracked.prefill is not None and worker == tracked.decode != tracked.prefill:
            if phase in (Phase.QUEUED, Phase.KV_READY):
                return  # a transfer under way
            if not tracked.handed_over:
                self.owned(tracked, now)
        elif tracked.handed_over:
            return
        present = tracked.life.phase
        if phase is Phase.PREEMPTED or present is Phase.PREEMPTED or _is_ahead(phase, present):
            tracked.life.go(phase, now)

    def token_came(self, tracked: Tracked, now: float) -> None:
        """Not its first: those come from who has it in its batch; or from who had it, while it waits again."""
        if tracked.life.phase is not Phase.WAITING and (tracked.handed_over or tracked.prefill is None):
            tracked.life.go(Phase.DECODING, now)

    def _prompt_found_at(self, tracked: Tracked, now: float) -> None:
        """Its workers have the KV of its prompt: whoever waits for that in its family may go there."""
        family = tracked.family
        if family is not None and not tracked.request.follows:
            family.prefill, family.decode = tracked.prefill, tracked.decode
            self._dispatcher.let_go(family, now)

    def _has_prompt(self, tracked: Tracked, worker_id: WorkerId | None) -> None:
        """What it computed or took over stays in its cache for a while."""
        worker = None if worker_id is None else self._registry.get(worker_id)
        if worker is not None:
            self._placing.prefixes.computed(worker, tracked.chain)

    # ------------------------------------------------------------ what time does

    def waits(self, tracked: Tracked, now: float) -> None:
        """It stands in the queue from now on, or is held there."""
        heappush(self._due, (self._waits_until(tracked, now), tracked.arrival, tracked.id))
        if len(self._due) > 2 * len(self._tracker) + 1024:
            self._due = [one for one in self._due if self._is_waiting(one[2])]
            heapify(self._due)

    def overdue(self, now: float) -> list[Effect]:
        """Ends those that have waited too long."""
        effects: list[Effect] = []
        again: list[Tracked] = []
        while self._due and self._due[0][0] <= now:
            tracked = self._tracker.get(heappop(self._due)[2])
            if tracked is not None and tracked.life.phase is Phase.WAITING:
                effects += self._out_of_time(tracked, now)
                again.append(tracked)
        for tracked in again:
            if self._is_waiting(tracked.id):
                self.waits(tracked, now)
        return effects

    def _is_waiting(self, request_id: RequestId) -> bool:
        tracked = self._tracker.get(request_id)
        return tracked is not None and tracked.life.phase is Phase.WAITING

    def _waits_until(self, tracked: Tracked, now: float) -> float:
        until = now + self._max_wait_s - self._waited_s(tracked, now)
        return until if tracked.deadline is None else min(until, tracked.deadline)

    def look_after(self, tracked: Tracked, now: float) -> list[Effect]:
        """One that workers have."""
        if tracked.deadline is not None and now >= tracked.deadline:
            return self.first_too_late(tracked, now)
        if tracked.command is not None:
            return self._ask_again(tracked, now)
        if now - tracked.seen_at >= self._unheld_after_s and not self._owner_is_silent(tracked):
            tracked.avoid.update(tracked.holders)  # it may have fallen silent and not be given up yet
            self._lost_tokens.unheard(tracked, "migration")
            return self.again(tracked, "no worker holds it any more", now)
        return []

    def first_too_late(self, tracked: Tracked, now: float) -> list[Effect]:
        said = self.abort_holders(tracked, "deadline")
        return said + self.fail(tracked, "DeadlinePassed", "its deadline passed before the first token", now)

    def _owner_is_silent(self, tracked: Tracked) -> bool:
        """Nothing was heard of it since it last had the request: it is found lost soon, and that counts as a death of
        what it ran. Taken for unheld, a request that kills its workers would walk from one to the next."""
        owner = tracked.decode if tracked.handed_over or tracked.prefill is None else tracked.prefill
        worker = None if owner is None else self._registry.get(owner)
        return worker is not None and not worker.lost and worker.heard_at <= tracked.seen_at

    def _out_of_time(self, tracked: Tracked, now: float) -> list[Effect]:
        """A deadline is for the first token; who has that waits as long as anybody may. So does a follower, once while
        it is held (its leader may need as long) and once in line, and there again whenever one of its family ends: more
        than a batch holds come in waves."""
        waited_s = self._waited_s(tracked, now)
        family = tracked.family
        if (
            family is not None
            and tracked.request.follows
            and waited_s >= self._max_wait_s
            and self._dispatcher.let_go(family, now)
        ):
            return []
        late = tracked.deadline is not None and now >= tracked.deadline
        if not late and waited_s < self._max_wait_s:
            return []
        reason = (
            "its deadline passed before a worker could take it"
            if late
            else f"no worker took it within {waited_s:.1f} s"
        )
        return self.fail(tracked, "RequestFailed" if tracked.outputs else "DeadlinePassed", reason, now)

    def _waited_s(self, tracked: Tracked, now: float) -> float:
        waited_s = tracked.life.seconds_in(Phase.WAITING, now)
        family = tracked.family
        if family is not None and tracked.request.follows:
            return min(waited_s, now - family.moved_at)
        return waited_s

    def _ask_again(self, tracked: Tracked, now: float) -> list[Effect]:
        if now < tracked.ask_at:
            return []
        if tracked.asks >= MAX_ASKS:
            tracked.avoid.update(tracked.holders[:1])
            return self.again(tracked, "the worker did not answer the dispatch", now)
        tracked.asks += 1
        tracked.ask_at = now + self._ask_again_s
        assert tracked.command is not None
        return [ToWorker(tracked.holders[0], tracked.command)]

    # ------------------------------------------------------------ how one ends

    def lost_holder(self, tracked: Tracked, worker: Worker, how: str, now: float) -> list[Effect]:
        if worker.id == tracked.decode and tracked.prefill is not None and not tracked.handed_over:
            return self._rebind(tracked, worker, how, now)
        tracked.avoid.add(worker.id)
        # What only stood in line there cannot have killed it, and who drains was to leave.
        if tracked.life.phase is not Phase.QUEUED and not worker.draining:
            tracked.deaths += 1
        if tracked.deaths >= MAX_DEATHS:
            stage = f"the last one {worker.id}, in {tracked.life.phase}"
            reason = f"{tracked.deaths} workers were lost while running it, {stage}"
            self._lost_tokens.unheard(tracked, "abort")
            said = self.abort_holders(tracked, reason)
            return said + self.fail(tracked, "RequestFailed", reason, now)
        self._lost_tokens.unheard(tracked, "migration")
        return self.again(tracked, f"{worker.id} {how}", now)

    def _rebind(self, tracked: Tracked, lost: Worker, how: str, now: float) -> list[Effect]:
        """The prefill worker still has every block: only the destination changes."""
        tracked.avoid.add(lost.id)
        rebound = self._dispatcher.rebind(tracked, now)
        if rebound is None:
            return self.again(tracked, f"{lost.id} {how}", now)
        tracked.went_wrong(f"{lost.id} {how}")
        return rebound

    def again(self, tracked: Tracked, why: str, now: float) -> list[Effect]:
        """Back to the queue with what the front has; the present attempt is told to end."""
        tracked.went_wrong(why)
        said = self.abort_holders(tracked, why)
        tracked.fruitless += 1
        if tracked.fruitless >= MAX_FRUITLESS:
            stage = f"given up in {tracked.life.phase} after {tracked.fruitless} attempts without a token"
            return said + self.fail(tracked, "RequestFailed", f"{stage}: {why}", now)
        self._counters.add("requests_migrated_total")
        self._dispatcher.take_back(tracked)
        tracked.life.move(Phase.WAITING, now)
        self._dispatcher.enqueue(tracked, now)
        self.waits(tracked, now)
        return said

    def abort_holders(self, tracked: Tracked, reason: str) -> list[Effect]:
        return [ToWorker(worker, Abort(*tracked.key, reason)) for worker in tracked.holders]

    def fail(self, tracked: Tracked, error: str, reason: str, now: float) -> list[Effect]:
        tracked.went_wrong(reason)
        ended = RequestEnded(tracked.id, error, reason)
        return [ToFront(tracked.request.front, ended), *self.end(tracked, Phase.FAILED, now)]

    def end(self, tracked: Tracked, phase: Phase, now: float) -> list[Effect]:
        """The one end of a request."""
        if tracked.life.phase is Phase.WAITING:
            self._queue.remove(tracked.id)
        self._dispatcher.release(tracked)
        tracked.life.move(phase, now)
        if phase is Phase.FINISHED:
            self._answered(tracked, now)
        self._tracker.end(tracked)
        return []

    def _answered(self, tracked: Tracked, now: float) -> None:
        request = tracked.request
        self._placing.lengths.ended(request.tier, request.sampling.max_tokens, len(tracked.outputs))
        worker = None if tracked.decode is None else self._registry.get(tracked.decode)
        if worker is not None and tracked.outputs:  # a conversation goes on from the answer
            self._placing.prefixes.computed(worker, chain_of(request, tracked.outputs[:-1]))
        if tracked.family is not None:
            tracked.family.moved_at = now
            self._prompt_found_at(tracked, now)


def _is_ahead(phase: Phase, of: Phase) -> bool:
    return phase in _ORDER and of in _ORDER and _ORDER.index(phase) > _ORDER.index(of)
