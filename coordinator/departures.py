"""Workers that go: told to (a drain), by themselves, because they died, or to come back in another role. Pure.

A drain is by level, as everything is: the worker is told after every heartbeat that does not show it yet. From then on
nothing new is given to it, so its going is neither a loss nor a death of the requests that it gives back.

    ready ─ change_role ─▶ draining ─ its process ends ─▶ starting ─ registers under its other id ─▶ ready
    draining ─ it falls silent, and never said that it drains ─▶ lost ─ by its deadline overdue, and killed ─▶ starting
    A death amid the drain: whoever starts it again does so in the role that it had, and the change is off. A death
    after it: in the new one.
"""

from __future__ import annotations

from collections import deque

from common.counters import Counters
from common.effects import Effect, ToWorker
from common.messages import Drain, Role, SetRole
from common.request import WorkerId
from common.roles import id_in_other_role
from coordinator.attempts import Attempts
from coordinator.errors_http import Conflict
from coordinator.registry import Registry, Worker
from coordinator.tracker import Tracker

SILENT = "stopped answering"


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
        self.no_prefill_wanted = False
        """The last prefill worker was told to become a decode worker, and none has come since."""

    def drain(self, worker_id: WorkerId, deadline_s: float, now: float) -> list[Effect] | None:
        """It gets nothing new from now on, finishes what it has within `deadline_s`, gives back the rest, and leaves.
        None where there is no such worker. Idempotent; the earlier deadline counts. Raises Conflict where it is
        lost."""
        worker = self._registry.get(worker_id)
        if worker is None:
            return None
        if worker.lost:
            raise _is_lost(worker)
        self._registry.drain(worker, now + deadline_s)
        self._notices.append(f"{worker.role} worker {worker_id} is to drain within {deadline_s:g} s")
        return self.say_drain(worker, now)

    def change_role(
        self, worker_id: WorkerId, role: Role, deadline_s: float, now: float
    ) -> list[Effect] | None:
        """It is drained, and comes back as a worker of `role`. None where there is no such worker. Nothing is to be
        done where it has that role. Idempotent; the earlier deadline counts. Raises Conflict."""
        worker = self._registry.get(worker_id)
        if worker is None:
            return None
        if worker.becomes != role:
            self._check_may_change(worker, role)
            if worker.role == role:
                return []
            self._notices.append(
                f"{worker.role} worker {worker_id} is to drain within {deadline_s:g} s, and to come back as "
                f"{id_in_other_role(worker_id, worker.role)}"
            )
        if worker.lost:
            return []  # it is on its way
        worker.becomes = role
        self._registry.drain(worker, now + deadline_s)
        if role == "decode" and not self._registry.usable("prefill"):
            self.no_prefill_wanted = True
        return self.say_drain(worker, now)

    def _check_may_change(self, worker: Worker, role: Role) -> None:
        if worker.lost:
            raise _is_lost(worker)
        if worker.becomes is not None:
            raise Conflict(
                f"Worker {worker.id} is on its way to the {worker.becomes} role.", code="worker_draining"
            )
        if worker.role == role:
            return
        if worker.draining:
            raise Conflict(f"Worker {worker.id} is draining: it is about to leave.", code="worker_draining")
        if worker.card.whole_batches:
            raise Conflict(
                "Request-level batching (--batching dynamic) is collocated only.", code="collocated_only"
            )
        if role == "prefill" and len(self._registry.usable("decode")) < 2:
            raise Conflict(
                f"Worker {worker.id} is the only decode worker that takes requests: start another one, or let a "
                "prefill worker become one, and ask again.",
                code="last_decode_worker",
            )

    def say_drain(self, worker: Worker, now: float) -> list[Effect]:
        if worker.drain_until is None:
            return []
        left_s = max(0.0, worker.drain_until - now)
        become = worker.becomes
        return [ToWorker(worker.id, Drain(left_s) if become is None else SetRole(become, left_s))]

    def lost(self, worker: Worker, how: str, now: float) -> list[Effect]:
        """It is marked lost already: what it held goes on elsewhere."""
        if worker.draining and (worker.drains or how != SILENT):
            how = "left"  # as it was told to, or by a signal
        else:
            how += ": it was to drain, and never said that it does" if worker.draining else ""
            self._counters.add("workers_lost_total", role=worker.role)
        self._notices.append(f"{worker.role} worker {worker.id} {how}")
        effects: list[Effect] = []
        for tracked in self._tracker.dispatched():
            if worker.id not in tracked.holders or (tracked.handed_over and worker.id != tracked.decode):
                continue
            effects += self._attempts.lost_holder(tracked, worker, how, now)
        return effects

    def look(self, now: float) -> None:
        """Says who hangs. Whoever started it must end it: `kvferry serve` looks for such ones."""
        for worker in self._registry.overdue(now):
            self._notices.append(
                f"{worker.role} worker {worker.id} was to leave and has not: it hangs, process {worker.card.pid} on "
                f"{worker.card.host}"
            )

    def replaced(self, worker: Worker, before: Worker | None, now: float) -> list[Effect]:
        """`worker` has registered, `before` was there under its name: that life is over, and so is the one in the other
        role that it comes from."""
        effects: list[Effect] = []
        if worker.role == "prefill":
            self.no_prefill_wanted = False
        if before is not None and not before.lost and before.incarnation != worker.incarnation:
            self._registry.mark_lost(before)
            effects += self.lost(before, "was restarted", now)
        changed = self._registry.before_change(worker)
        if changed is not None:
            if not changed.lost:
                self._registry.mark_lost(changed)
                effects += self.lost(changed, "left", now)
            changed.becomes, changed.came_back = None, True
            self._counters.add("role_changes_total", role=worker.role)
        return effects


def _is_lost(worker: Worker) -> Conflict:
    """Nothing can be asked of it before it, or whoever comes in its place, has registered."""
    name = id_in_other_role(worker.id, worker.role)
    if worker.came_back:
        what = f"is {name} now"
    elif worker.becomes is not None:
        what = f"is expected back as {name}: ask for that one once it is here"
    else:
        what = f"{'has left' if worker.left else 'is lost'}: ask again once it is back"
    return Conflict(f"Worker {worker.id} {what}.", code="worker_lost")
