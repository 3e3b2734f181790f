"""Workers that go: told to (a drain), by themselves, or because they died. Pure.

A drain is by level, as everything is: the worker is told after every heartbeat that does not show it yet. From then on
nothing new is given to it, so its going is neither a loss nor a death of the requests that it gives back.
"""

from __future__ import annotations

from collections import deque

from common.counters import Counters
from common.effects import Effect, ToWorker
from common.messages import Drain
from common.request import WorkerId
from coordinator.attempts import Attempts
from coordinator.registry import Registry, Worker
from coordinator.tracker import Tracker


class Departures:
    def __init__(
        self,
        registry: Registry,
        tracker: Tracker,
        attempts: Attempts,
        counters: Counters,
        notices: deque[str],
    ) -> None:
        self._registry = registry
        self._tracker = tracker
        self._attempts = attempts
        self._counters = counters
        self._notices = notices

    def drain(self, worker_id: WorkerId, deadline_s: float, now: float) -> list[Effect] | None:
        """It gets nothing new from now on, finishes what it has within `deadline_s`, gives back the rest, and leaves.
        None where there is no such worker, or it is lost. Idempotent; the earlier deadline counts."""
        worker = self._registry.get(worker_id)
        if worker is None or worker.lost:
            return None
        self._registry.drain(worker, now + deadline_s)
        self._notices.append(f"{worker.role} worker {worker_id} is to drain within {deadline_s:g} s")
        return self.say_drain(worker, now)

    def say_drain(self, worker: Worker, now: float) -> list[Effect]:
        if worker.drain_until is None:
            return []
        return [ToWorker(worker.id, Drain(max(0.0, worker.drain_until - now)))]

    def lost(self, worker: Worker, how: str, now: float) -> list[Effect]:
        """It is marked lost already: what it held goes on elsewhere."""
        if worker.draining:
            how = "left"  # as it was told to, or by a signal
        else:
            self._counters.add("workers_lost_total", role=worker.role)
        self._notices.append(f"{worker.role} worker {worker.id} {how}")
        effects: list[Effect] = []
        for tracked in self._tracker.dispatched():
            if worker.id not in tracked.holders or (tracked.handed_over and worker.id != tracked.decode):
                continue
            effects += self._attempts.lost_holder(tracked, worker, how, now)
        return effects
