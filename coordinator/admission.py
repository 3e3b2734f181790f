"""Whether a group of requests may come in: refused at once are those that could never be served, or not now. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.front_messages import Rejected
from common.request import Request
from coordinator.dispatcher import Dispatcher
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry


class Admission:
    def __init__(self, registry: Registry, queue: WaitingQueue, dispatcher: Dispatcher) -> None:
        self._registry = registry
        self._queue = queue
        self._dispatcher = dispatcher

    def rejection(self, requests: Sequence[Request], *, draining: bool) -> Rejected | None:
        """None when the group may wait in the queue."""

        def no(error: str, reason: str, retry_after_s: float = 0.0, code: str = "") -> Rejected:
            return Rejected(requests[0].request_id, error, reason, retry_after_s, code)

        if draining:
            return no("NoWorker", "the service is shutting down")
        if any(request.prompt_tokens == 0 for request in requests):
            return no("BadRequest", "the prompt is empty")
        limit = self._registry.max_model_len()
        if limit is None or not self._registry.usable("decode"):
            return no("NoWorker", "no decode worker is ready")
        longest = max(requests, key=lambda request: request.max_total_tokens)
        if longest.max_total_tokens > limit:
            asked = f"{longest.prompt_tokens} prompt tokens and {longest.sampling.max_tokens} output tokens"
            why = f"{asked} do not fit the limit of {limit} tokens"
            return no("BadRequest", why, code="context_length_exceeded")
        tokens = sum(1 if request.follows else request.prompt_tokens for request in requests)
        tier = requests[0].tier
        never = self._queue.never_fits(len(requests), tokens, tier)
        if never is not None:
            return no("BadRequest", never, code="too_many_choices")
        full = self._queue.full_for(len(requests), tokens, tier)
        return None if full is None else no("NotAdmitted", full, self._dispatcher.retry_after_s())
