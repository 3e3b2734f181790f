"""Whether a group of requests may come in: refused at once are those that could never be served, or not now. Pure.

Not now: the queue is full, or the tier promises a first token within a time that the forecast does not hold. Such a
one is told when it would be taken, if nobody else came meanwhile. Who fits waits up to the slack of its target. A
request without a target is refused by no forecast.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.front_messages import Rejected
from common.lifecycle import Life, Phase
from common.ordering import due_at
from common.request import Request
from coordinator.dispatcher import Dispatcher
from coordinator.forecast import Forecaster, fits_after_s, limit_s
from coordinator.placing import Placing
from coordinator.prefixes import chain_of
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.targets import NO_TARGETS
from coordinator.tracker import Forecast, Tracked

NEWEST = 1 << 62
"""As an arrival: after everybody that is here."""


class Admission:
    def __init__(
        self,
        registry: Registry,
        queue: WaitingQueue,
        dispatcher: Dispatcher,
        placing: Placing,
        forecaster: Forecaster,
        *,
        refuse_late: bool,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._dispatcher = dispatcher
        self._placing = placing
        self._forecaster = forecaster
        self._refuse_late = refuse_late

    def rejection(self, requests: Sequence[Request], *, draining: bool) -> Rejected | None:
        """None when the group may wait in the queue."""

        def no(
            error: str, reason: str, retry_after_s: float = 0.0, code: str = "", param: str = ""
        ) -> Rejected:
            return Rejected(requests[0].request_id, error, reason, retry_after_s, code, param)

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
            param = "n" if any(request.follows for request in requests) else "prompt"
            return no("BadRequest", never, code="too_many_choices", param=param)
        full = self._queue.full_for(len(requests), tokens, tier)
        return None if full is None else no("NotAdmitted", full, self._dispatcher.retry_after_s())

    def forecast(self, request: Request, now: float) -> Forecast | None:
        """Of the first token of one that came now. None where nothing was promised, or nobody can say."""
        if self._placing.targets(request) == NO_TARGETS:
            return None
        life = Life(Phase.WAITING, now)
        tracked = Tracked(request, NEWEST, life, None, due_at(request, now), chain=chain_of(request))
        tracked.lane = self._queue.policy.lane(request)
        self._placing.arrives(request, tracked.lane[0], now)
        return None if self._placing.targets(request).ttft_s is None else self._forecaster.of(tracked, now)

    def late(self, request: Request, forecast: Forecast) -> Rejected | None:
        """None where that keeps its promise."""
        targets = self._placing.targets(request)
        within_s = limit_s(forecast, targets)
        if not self._refuse_late or within_s is None:
            return None
        if forecast.ttft_s > within_s:
            promised = f"tier {request.tier} promises {targets.ttft_s:g} s"
            why = f"its first token would take {forecast.ttft_s:.2f} s, {promised}"
            return Rejected(request.request_id, "NotAdmitted", why, fits_after_s(forecast, within_s))
        if forecast.spoils_s:
            why = f"others that wait would miss what they were promised for it, by {forecast.spoils_s:.2f} s"
            return Rejected(request.request_id, "NotAdmitted", why, forecast.spoils_s)
        return None
