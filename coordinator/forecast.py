"""When a request that came now would have its first token, and what its targets allow. Pure.

From the step times that workers say of themselves, and the coordinator's own account of what is ahead: prompts given
to each worker, prompts in the queue before this one, rows of the decode batches. The queue is played forward, one
prompt after the other, by the rule by which it will be given out (`lookahead.py`), behind as many as that is cheap for;
what stands before those fills the workers up evenly. A row of a decode batch that keeps its ITL targets may be longer
in coming (the k-th of those that stand there to end, by the answers that its tier gives). Better classes go on coming:
what they are guessed to take of the workers' time (`pressure.py`) is not there for it. What comes out is corrected by
how such forecasts have done of late, between half and twice as long.

Who would go before others of its class that wait and were promised a time, by its tenant's share or its deadline, is
not let in while one of those would miss it for that.

A prompt so long that it would miss alone is held to LONG times what it takes alone: an idle service refuses nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from common.request import WorkerId
from coordinator.first_token import LATEST
from coordinator.lanes import Entry
from coordinator.lookahead import Asked, Computer, Lookahead
from coordinator.placing import Placing
from coordinator.queue import WaitingQueue
from coordinator.recent_gaps import ENOUGH
from coordinator.registry import Worker
from coordinator.router import Router
from coordinator.step_costs import LEAST_CHUNK, Pace
from coordinator.targets import Targets
from coordinator.tracker import Forecast, Tracked, Tracker

LONG = 1.5
MOST_SINGLE = 32
MOST_LOOKS = 2048
"""Prompts of the queue times workers that may compute them, that are looked at for one forecast."""
MOST_CORRECTION = 2.0
FIRST_CORRECTION = 1.1  # steps measured before there was a load are shorter than they are under it
MOST_CLASSES = 64
USUAL = 0.6  # of forecasts like the last ones are to come true; most are nowhere near their limit
MISSED = 0.04
"""Of those that were taken in, so many may come too late."""
RECENT = 128
LATELY_S = 60.0
COUNTS_FROM = 0.25
"""Of its target: what is forecast to be sooner is never near being refused, and mostly of what no forecast knows."""


def limit_s(forecast: Forecast, targets: Targets) -> float | None:
    """Within which the first token must be forecast to be promised, None: nothing is. Some of the target is needed to
    hold it back for the sake of the gap after it (`first_token.py`)."""
    if targets.ttft_s is None:
        return None
    limit_s = targets.ttft_s
    if targets.itl_s is not None and forecast.gap_s > targets.itl_s:
        hold_s = min(forecast.gap_s - targets.itl_s, targets.itl_s)
        limit_s = min(limit_s, LATEST * targets.ttft_s - hold_s)
    return max(limit_s, LONG * forecast.alone_s)


def fits_after_s(forecast: Forecast, within_s: float) -> float:
    """When it would be forecast to be within that, if nobody came meanwhile."""
    factor = forecast.ttft_s / forecast.plain_s
    first_s = forecast.plain_s - forecast.coming.takes_s(forecast.plain_s)
    alone_s = min(first_s, forecast.alone_s / max(1.0, factor))
    return factor * forecast.coming.fits_after_s(first_s, alone_s, within_s / factor)


@dataclass(frozen=True, slots=True)
class _Came:
    """A first token: when, how many times the forecast it took, and how many times it was allowed to take."""

    at: float
    took: float
    allowed: float
    local: bool


class Correction:
    """How much longer first tokens of a class took than was forecast of late. Of each way to them: in the middle, a
    little to the safe side. Where more than MISSED of them all came too late, it is at least so much that those of them
    that came nearest to being refused would have been. Forgotten after LATELY_S: who is refused for it shows nothing of
    how long it would have taken."""

    def __init__(self) -> None:
        self._came: deque[_Came] = deque(maxlen=RECENT)
        self._factors = dict.fromkeys((False, True), FIRST_CORRECTION)

    def observed(self, took_s: float, forecast_s: float, within_s: float, now: float, *, local: bool) -> None:
        self._came.append(_Came(now, took_s / forecast_s, within_s / forecast_s, local))
        self._count()

    def factor(self, now: float, *, local: bool) -> float:
        if self._came and now - self._came[0].at > LATELY_S:
            while self._came and now - self._came[0].at > LATELY_S:
                self._came.popleft()
            self._count()
        return self._factors[local]

    def _count(self) -> None:
        late = sorted(one.allowed for one in self._came if one.took > one.allowed)
        too_many = len(late) - int(MISSED * len(self._came))
        least = late[too_many - 1] if too_many > 0 and len(self._came) >= ENOUGH else 0.0
        for local in self._factors:
            took = sorted(one.took for one in self._came if one.local is local)
            usual = took[int(USUAL * (len(took) - 1))] if len(took) >= ENOUGH else FIRST_CORRECTION
            self._factors[local] = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, usual, least))


class Forecaster:
    def __init__(self, queue: WaitingQueue, tracker: Tracker, router: Router, placing: Placing) -> None:
        self._queue = queue
        self._tracker = tracker
        self._router = router
        self._placing = placing
        self._corrections: dict[int, Correction] = {}

    def of(self, tracked: Tracked, now: float) -> Forecast | None:
        """None while step times are not known of every worker that may compute it."""
        deciders, prefillers = self._placing.deciders(tracked), self._placing.prefillers(tracked)
        pools = self._computers(tracked, prefillers or deciders, now)
        if pools is None or not pools:
            return None
        local = self._beside(tracked, deciders, now) if prefillers else {}
        beside = list(local.values())
        requests, tokens = self._queue.ahead_of(tracked.lane)
        most = min(MOST_SINGLE, MOST_LOOKS // (len(pools) + len(beside)))
        place = self._queue.policy.place(tracked.due, tracked.arrival)
        before, behind = self._queue.around(tracked.lane, place, most) if len(self._queue) else ([], [])
        if len(before) == most:
            _fill([*pools, *beside], max(0.0, tokens - sum(entry.tokens for entry in before)))
        gap_s = min(map(self._placing.gap_s, deciders)) if prefillers else 0.0
        alone_s = min(one.pace.alone_s(one.own_tokens) for one in (*pools, *beside))
        ahead = Lookahead(pools, beside, gap_s)
        row_s = self._row_waits(tracked, deciders, local, now)
        for number, entry in enumerate(before):
            ahead.after(row_s(number))
            ahead.next(self._asked(entry, len(before) - number + len(behind), now))
        ahead.after(row_s(len(before) if len(before) < most else round(requests)))
        without = ahead.copy() if behind else ahead
        left_s = self._placing.left_s(tracked, now)
        first_s, is_local = ahead.next(Asked(None, left_s, waiting=len(behind)))
        spoils_s = self._spoils_s(behind, ahead, without, now)
        coming = self._placing.pressure.above(tracked.lane[0], now)
        first_s = coming.done_s(first_s)
        gap_s = 0.0 if is_local or not prefillers else max(map(self._placing.late_gap_s, deciders))
        factor = self.correction(tracked.lane[0]).factor(now, local=is_local)
        alone_s *= max(1.0, factor)  # else an idle service would refuse who takes long, for ever
        return Forecast(factor * first_s, first_s, gap_s, alone_s, spoils_s, is_local, coming)

    def correction(self, number: int) -> Correction:
        """Of a class: a better one is forecast better."""
        found = self._corrections.get(number)
        if found is None:
            if len(self._corrections) >= MOST_CLASSES:
                del self._corrections[next(iter(self._corrections))]
            found = self._corrections[number] = Correction()
        return found

    def _spoils_s(self, behind: list[Entry], ahead: Lookahead, without: Lookahead, now: float) -> float:
        """By how much those that wait behind it, and were promised a time, would miss that for its sake."""
        spoils_s = 0.0
        for number, entry in enumerate(behind, 1):
            correction, asked = self.correction(entry.lane[0]), self._asked(entry, len(behind) - number, now)
            nexts = [way.next(asked) for way in (ahead, without)]
            first_s, would_be_s = (correction.factor(now, local=is_local) * s for s, is_local in nexts)
            other = self._tracker.get(entry.id)
            if other is None or other.forecast is None:
                continue
            within_s = limit_s(other.forecast, self._placing.targets(other.request))
            left_s = (within_s or 0.0) - (now - other.submitted_at)
            if would_be_s <= left_s < first_s:
                spoils_s = max(spoils_s, first_s - left_s)
        return spoils_s

    def _asked(self, entry: Entry, waiting: int, now: float) -> Asked:
        other = self._tracker.get(entry.id)
        if other is None:
            return Asked(entry.tokens, waiting=waiting)
        return Asked(entry.tokens, self._placing.left_s(other, now), other.plan, waiting)

    def came(self, tracked: Tracked, now: float) -> None:
        """Its first token has."""
        forecast, targets = tracked.forecast, self._placing.targets(tracked.request)
        tracked.forecast = None
        if forecast is None or targets.ttft_s is None or tracked.attempts > 1:
            return
        if forecast.plain_s >= COUNTS_FROM * targets.ttft_s:
            took_s, within_s = now - tracked.submitted_at, limit_s(forecast, targets) or targets.ttft_s
            self.correction(tracked.lane[0]).observed(
                took_s, forecast.plain_s, within_s, now, local=tracked.prefill is None
            )

    def _computers(self, tracked: Tracked, workers: list[Worker], now: float) -> list[Computer] | None:
        found = []
        for worker in workers:
            pace = self._placing.pace(worker, self._placing.targets(tracked.request).itl_s)
            if pace is None:
                return None
            found.append(self._computer(tracked, worker, pace, now))
        return found

    def _beside(self, tracked: Tracked, deciders: list[Worker], now: float) -> dict[WorkerId, Computer]:
        """Decode workers that may compute it though there are prefill workers."""
        found: dict[WorkerId, Computer] = {}
        if not self._placing.local_prefill or tracked.request.scored_prompt_tokens:
            return found
        for worker in deciders:
            local = self._placing.local(worker, self._placing.targets(tracked.request).itl_s)
            if local is not None and local.step_tokens >= LEAST_CHUNK:
                one = found[worker.id] = self._computer(tracked, worker, local, now)
                one.local_gap_s = self._placing.row_step_s(worker)
        return found

    def _computer(self, tracked: Tracked, worker: Worker, pace: Pace, now: float) -> Computer:
        tokens = self._placing.to_compute(tracked, worker)
        prompts = self._router.prompts(worker.id)
        return Computer(pace, prompts.line(tracked.lane[0], tokens, pace.alone_s(tokens), now), tokens)

    def _row_waits(
        self, tracked: Tracked, deciders: list[Worker], local: Mapping[WorkerId, Computer], now: float
    ) -> Callable[[int], float]:
        """Until whoever so many wait before finds a row of a decode batch. Steps with prompts in them take longer until
        those of `local` are computed, as far as those are known when it is asked."""
        free = self._placing.free_rows(tracked, deciders, now)
        steps_s = {worker.id: self._placing.row_step_s(worker) for worker in deciders}
        rows = [
            (self._placing.answer_left(other), other.decode)
            for other in self._tracker.dispatched()
            if other.decode in steps_s
        ]

        def wait_s(waiting: int) -> float:
            if waiting < free or not rows:
                return 0.0
            ends_s = sorted(
                _steps_s(left, steps_s[worker], local.get(worker)) for left, worker in rows if worker
            )
            rounds, place = divmod(waiting - free, len(ends_s))
            answer_s = self._placing.answer_left(tracked) * sum(steps_s.values()) / len(steps_s)
            return ends_s[place] + rounds * answer_s

        return cache(wait_s) if len(rows) > MOST_SINGLE else wait_s


def _steps_s(steps: int, row_step_s: float, local: Computer | None) -> float:
    """Of an answer that has so many left, the first of which is half done: longer ones where prompts stand in them."""
    left, at_s = steps - 0.5, 0.0
    if local is None or not local.line or not row_step_s:
        return left * row_step_s
    tokens = local.line[-1][1]
    longer_s = local.pace.taken_s(tokens) / (0.5 - (-tokens // local.pace.step_tokens))
    given_s = local.line[-1 - len(local.later)][0] if len(local.line) > len(local.later) else 0.0
    for begins_s, ends_s in ((0.0, given_s), *local.later):
        between = min(left, (begins_s - at_s) / row_step_s)
        if between == left:
            break
        left -= between
        during = min(left, (ends_s - begins_s) / longer_s)
        if during == left:
            return begins_s + during * longer_s
        left -= during
        at_s = ends_s
    return at_s + left * row_step_s


def _fill(computers: Sequence[Computer], tokens: float) -> None:
    """So many tokens of those that wait go to whoever is free first, and fill them up evenly, as water would."""
    level_s = _level([(one.free_s, _token_s(one.pace)) for one in computers], tokens)
    for one in computers:
        if one.free_s < level_s:
            one.line = [(level_s, one.pace.step_tokens)]


def _token_s(pace: Pace) -> float:
    """Of each token of a whole step."""
    return pace.taken_s(pace.step_tokens) / pace.step_tokens


def _level(servers: Sequence[tuple[float, float]], tokens: float) -> float:
    """Seconds until those that are free then, each with seconds a token, have begun so many."""
    if not tokens:
        return 0.0
    level_s = work = per_s = 0.0
    for free_s, token_s in sorted(servers):
        if per_s and work + (free_s - level_s) * per_s >= tokens:
            break
        work += (free_s - level_s) * per_s
        level_s = free_s
        per_s += 1 / token_s if token_s > 0 else 1e9
    return level_s + (tokens - work) / per_s
