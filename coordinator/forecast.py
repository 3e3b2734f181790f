"""When a request that came now would have its first token, and what its targets allow. Pure.

From the step times that workers say of themselves, and the coordinator's own account of what is ahead: prompts given
to each worker, prompts in the queue before this one, rows of the decode batches. Three waits, of which the longest
counts: for a worker that computes prompts (the queue fills them up evenly, as water would), for a row of a decode
batch that keeps its ITL targets (the k-th of those that stand there to end, by the answers that its tier gives), and
the prompt's own time after that. What comes out is corrected by how such forecasts have done of late, between half
and twice as long.

A prompt so long that it would miss alone is held to LONG times what it takes alone: an idle service refuses nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.first_token import CAUTION as PACING_CAUTION
from coordinator.placing import Placing
from coordinator.queue import WaitingQueue
from coordinator.recent_gaps import ENOUGH
from coordinator.registry import Worker
from coordinator.router import Router
from coordinator.step_costs import LEAST_CHUNK, prompt_seconds, share_seconds
from coordinator.targets import Targets
from coordinator.tracker import Forecast, Tracked, Tracker

LONG = 1.5
MOST_SINGLE = 32
MOST_CORRECTION = 2.0
FIRST_CORRECTION = 1.04  # a step more or less is what no forecast can know
KEPT = 0.9  # of forecasts like the last ones are to come true; most are nowhere near their limit
COUNTS_FROM = 0.25
"""Of its target: what is forecast to be sooner is never near being refused, and mostly of what no forecast knows."""


def limit_s(forecast: Forecast, targets: Targets) -> float | None:
    """Within which the first token must be forecast to be promised, None: nothing is. Some of the target is needed to
    hold it back for the sake of the gap after it (`first_token.py`)."""
    if targets.ttft_s is None:
        return None
    limit_s = targets.ttft_s
    if targets.itl_s is not None and forecast.gap_s > targets.itl_s:
        hold_s = min(forecast.gap_s - PACING_CAUTION * targets.itl_s, targets.itl_s)
        limit_s = min(limit_s, PACING_CAUTION * targets.ttft_s - hold_s)
    return max(limit_s, LONG * forecast.alone_s)


@dataclass(frozen=True, slots=True)
class _Server:
    """Who may compute the prompt: seconds of work ahead there, of this one, and of a token of those in the queue."""

    ahead_s: float
    own_s: float
    alone_s: float
    token_s: float


class Correction:
    """How much longer first tokens took than was forecast of late: by so much that nearly all would have come true."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=64)
        self.factor = FIRST_CORRECTION

    def observed(self, took_s: float, forecast_s: float) -> None:
        self._ratios.append(took_s / forecast_s)
        if len(self._ratios) >= ENOUGH:
            usual = sorted(self._ratios)[int(KEPT * (len(self._ratios) - 1))]
            self.factor = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, usual))


class Forecaster:
    def __init__(self, queue: WaitingQueue, tracker: Tracker, router: Router, placing: Placing) -> None:
        self._queue = queue
        self._tracker = tracker
        self._router = router
        self._placing = placing
        self.correction = Correction()

    def of(self, tracked: Tracked, now: float) -> Forecast | None:
        """None while step times are not known of every worker that may compute it."""
        deciders = self._placing.deciders(tracked)
        prefillers = self._placing.prefillers(tracked)
        requests, tokens = self._queue.ahead_of(tracked.lane)
        mean = tokens / requests if requests else float(tracked.tokens)
        servers = [self._server(tracked, w, mean, now) for w in prefillers or deciders]
        known = [server for server in servers if server is not None]
        if not known or len(known) < len(servers):
            return None
        if prefillers and self._placing.local_prefill:
            beside = [self._server(tracked, w, mean, now, LEAST_CHUNK) for w in deciders]
            known += [server for server in beside if server is not None]
        row_wait_s = self._row_wait_s(tracked, deciders, round(requests), now)
        begins_s = _begins(known, round(requests), tokens)
        first_s = min(
            max(begin_s, row_wait_s) + (server.own_s if begin_s else server.alone_s)
            for server, begin_s in zip(known, begins_s, strict=True)
        )
        gap_s = min(map(self._placing.gap_s, deciders)) if prefillers else 0.0
        alone_s = min(server.alone_s for server in known)
        return Forecast(first_s * self.correction.factor, first_s, gap_s, alone_s)

    def came(self, tracked: Tracked, now: float) -> None:
        """Its first token has."""
        forecast, targets = tracked.forecast, self._placing.targets(tracked.request)
        tracked.forecast = None
        if forecast is None or targets.ttft_s is None or tracked.attempts > 1:
            return
        if forecast.plain_s >= COUNTS_FROM * targets.ttft_s:
            self.correction.observed(now - tracked.submitted_at, forecast.plain_s)

    def _server(
        self, tracked: Tracked, worker: Worker, mean: float, now: float, least_chunk: int = 0
    ) -> _Server | None:
        """`mean` tokens have those that wait in the queue."""
        model = worker.load.step_model
        if not model:
            return None
        budget = worker.card.max_num_batched_tokens
        tokens = self._placing.to_compute(tracked, worker)
        ahead_s = self._router.prompts(worker.id).seconds_ahead(tracked.lane[0], now)
        if worker.role == "decode":
            local = self._placing.local(worker, self._placing.targets(tracked.request).itl_s)
            if local is None or local.chunk < least_chunk:
                return None
            own_s = local.seconds(tokens)
            return _Server(
                ahead_s,
                own_s,
                prompt_seconds(model, tokens, budget),
                local.row_step_s / local.chunk + local.token_s,
            )
        full_step_s = share_seconds(model, 1, budget, budget)
        own_s = (
            share_seconds(model, 1, tokens, budget) + full_step_s / 2
        )  # it ends within a step that it shares
        alone_s = prompt_seconds(model, tokens, budget)
        return _Server(ahead_s, own_s, alone_s, share_seconds(model, 1, max(1, round(mean)), budget) / mean)

    def _row_wait_s(self, tracked: Tracked, deciders: list[Worker], waiting: int, now: float) -> float:
        """Until so many have found a row of a decode batch, and then this one."""
        short = waiting + 1 - self._placing.free_rows(tracked, deciders, now)
        if short <= 0:
            return 0.0
        steps_s = {worker.id: self._placing.row_step_s(worker) for worker in deciders}
        ends_s = sorted(
            self._placing.answer_left(other) * steps_s[other.decode]
            for other in self._tracker.dispatched()
            if other.decode in steps_s
        )
        if not ends_s:
            return 0.0
        rounds, place = divmod(short - 1, len(ends_s))
        answer_s = self._placing.answer_left(tracked) * sum(steps_s.values()) / len(steps_s)
        return ends_s[place] + rounds * answer_s


def _begins(servers: Sequence[_Server], requests: int, tokens: float) -> list[float]:
    """Seconds until each of them is free for one that comes behind a queue of so many prompts with so many tokens
    together, each of which goes where it is done first; of many, the first ones fill up the servers as water
    would."""
    free_s = [server.ahead_s for server in servers]
    if not requests:
        return free_s
    each = tokens / requests
    if requests > MOST_SINGLE:
        level_s = _level(servers, tokens - MOST_SINGLE * each)
        free_s = [max(ahead_s, level_s) for ahead_s in free_s]
    for _ in range(min(requests, MOST_SINGLE)):
        done_s = [at_s + each * server.token_s for at_s, server in zip(free_s, servers, strict=True)]
        soonest = done_s.index(min(done_s))
        free_s[soonest] = done_s[soonest]
    return free_s


def _level(servers: Sequence[_Server], tokens: float) -> float:
    """Seconds until the queue before this one is begun, filled into whoever is free first."""
    if not tokens:
        return 0.0
    level_s = work = per_s = 0.0
    for server in sorted(servers, key=lambda server: server.ahead_s):
        if per_s and work + (server.ahead_s - level_s) * per_s >= tokens:
            break
        work += (server.ahead_s - level_s) * per_s
        level_s = server.ahead_s
        per_s += 1 / server.token_s if server.token_s > 0 else 1e9
    return level_s + (tokens - work) / per_s
