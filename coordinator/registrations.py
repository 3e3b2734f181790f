"""Workers that come: who is taken in, who is told why not, and what the log says of it. Pure."""

from __future__ import annotations

from collections import deque

from common.counters import Counters
from common.effects import Effect, ToWorker
from common.messages import Register, Registered, RegistrationRefused, Sender
from common.request import WorkerId
from coordinator.departures import Departures
from coordinator.registry import Registry, name_taken


class Registrations:
    def __init__(
        self,
        registry: Registry,
        departures: Departures,
        counters: Counters,
        notices: deque[str],
        policy: str,
    ) -> None:
        """`policy`: by which the queue is ordered (`common/ordering.py`)."""
        self._registry = registry
        self._departures = departures
        self._counters = counters
        self._notices = notices
        self._policy = policy

    def hear(self, card: Register, sender: Sender, now: float) -> list[Effect]:
        """A worker's card: the answer to it, and what becomes of requests that an earlier life of it had."""
        worker_id = WorkerId(sender.name)
        before = self._registry.get(worker_id)
        effects: list[Effect] = []
        if before is not None and not before.lost and before.incarnation > sender.incarnation:
            # Incarnations rise: this life is over, and must not put out the present one.
            self._counters.add("late_messages_total", kind=type(card).__name__)
            return [ToWorker(worker_id, name_taken(before, sender))]
        limit = self._registry.max_model_len()
        answer = self._registry.register(card, sender, now)  # who is refused puts out nobody either
        self._note(worker_id, card, answer, limit)
        worker = self._registry.get(worker_id, sender.incarnation)
        if isinstance(answer, Registered) and worker is not None:
            effects = self._departures.replaced(worker, before, now)
        return [*effects, ToWorker(worker_id, answer)]

    def _note(
        self,
        worker_id: WorkerId,
        card: Register,
        answer: Registered | RegistrationRefused,
        limit_before: int | None,
    ) -> None:
        if isinstance(answer, RegistrationRefused):
            difference = f"its {answer.field} is {answer.theirs}, here it is {answer.ours}"
            self._notices.append(f"{card.role} worker {worker_id} refused: {difference}")
            return
        notice = f"{card.role} worker {worker_id} registered, process {card.pid} on {card.host}"
        if limit_before is not None and answer.max_model_len < limit_before:
            fall = f"{limit_before} to {answer.max_model_len} tokens"
            notice += f"; the longest prompt and answer together fall from {fall}: its pool is smaller"
        self._notices.append(notice)
        if card.scheduling_policy not in ("", self._policy):
            self._notices.append(
                f"worker {worker_id} orders by {card.scheduling_policy}, the queue here by {self._policy}: forecasts "
                "and promises of tiers hold where all have the same --scheduling-policy"
            )
