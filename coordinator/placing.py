"""Which pair of workers gets a request, or which decode worker alone. Pure.

Of the prefill workers with room the one that should have its first token soonest, what it finds in its cache counted;
of the decode workers the one with the least of its batch taken, where a whole prompt in the cache weighs as much as
AFFINITY of a batch. Who is lost or drains, or has no room, is never asked, whatever it has in its cache.

A decode worker has room while its batch has rows and blocks, and while one more row keeps the tightest ITL target of
those that stand there, unless a row alone would miss that too: then it binds nobody. A class that is worse than one
with targets that was asked for of late leaves HEADROOM of each batch free for that one, and keeps its ITL target as
if it stood there already: who is promised little fills what is left, and who is promised much finds a place.

Conditional disaggregation. A decode worker computes a prompt itself where its second token should be there sooner
than by way of a prefill worker, by a tenth at least, so that near equal ways do not take turns: a prompt that is
short or mostly in its cache (the transfer would take longer), or any other while prefill is behind and the decode
batch has time to spare within its ITL target, and within that of better classes that were asked for of late. One that
would be in time by way of a prefill worker, or was promised no first token, may not take more from the others than it
gains: each row of the batch is late by what the prompt's tokens take, and each that waits in the queue has it out of
its way at the prefill workers. Without that a full decode batch stood still for the sake of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.promised import Promised
from common.request import Request
from coordinator.answer_lengths import AnswerLengths
from coordinator.lookahead import Asked, local_gain, worth
from coordinator.prefixes import Prefixes
from coordinator.pressure import Pressure
from coordinator.recent_gaps import RecentGaps
from coordinator.registry import Registry, Worker
from coordinator.router import Router, Share, least
from coordinator.step_costs import (
    LEAST_CHUNK,
    Beside,
    Chunks,
    Pace,
    gap_seconds,
    left_of_chunk,
    local_chunk,
    rows_within,
)
from coordinator.targets import NO_TARGETS, Targets
from coordinator.tracker import Tracked

AFFINITY = 0.25
HEADROOM = 1 / 8
SLOWER = 1.3
LATE_GAP = 0.7
"""Of hand-overs by way of a prefill worker, so many take no longer than is reckoned with."""
GAP_STEPS = 1.5
"""Steps from first to second token by way of a prefill worker, while nothing is known of it: half of one that runs,
one, and the transfer beside it."""


def blocks_of(tokens: int, block_size: int) -> int:
    """What so many new tokens take of a decode worker: they may begin and end inside a block, and grow by one."""
    return tokens // block_size + 2


@dataclass(frozen=True, slots=True)
class Way:
    """To a request's first token, by a worker that computes `tokens` of its prompt. `first`: how long that takes from
    now on, in seconds, or in tokens where step times are not known of all that were asked."""

    worker: Worker
    tokens: int
    pace: Pace | None
    first: float


class Placing:
    def __init__(
        self,
        registry: Registry,
        router: Router,
        *,
        targets: Mapping[str, Targets],
        local_prefill: bool,
    ) -> None:
        self._registry = registry
        self._router = router
        self._targets = dict(targets)
        self.local_prefill = local_prefill
        self.prefixes = Prefixes()
        self.lengths = AnswerLengths()
        self.gaps = RecentGaps()
        self.pressure = Pressure()
        self._promised = Promised()  # ITL targets

    # ------------------------------------------------------------ promises

    def targets(self, request: Request) -> Targets:
        return self._targets.get(request.tier, NO_TARGETS)

    def left_s(self, tracked: Tracked, now: float) -> float | None:
        """Of the workers' time until its first token should be out, if that was promised: better classes take some."""
        ttft_s = self.targets(tracked.request).ttft_s
        if ttft_s is None:
            return None
        left_s = ttft_s - (now - tracked.submitted_at)
        return left_s - min(max(0.0, left_s), self.pressure.above(tracked.lane[0], now).takes_s(left_s))

    def comes(self, tracked: Tracked, now: float) -> None:
        """It stands in line now. What it takes of the time of all that may compute it, as if it were shared out so that
        all are busy for as long: who gets it is not known yet."""
        prefillers, deciders = self.prefillers(tracked), self.deciders(tracked)
        itl_s = self.targets(tracked.request).itl_s
        paces = [(worker, self.pace(worker, itl_s)) for worker in prefillers or deciders]
        if prefillers and self.local_prefill and not tracked.request.scored_prompt_tokens:
            beside = [(worker, self.local(worker, itl_s)) for worker in deciders]
            paces += [(w, pace) for w, pace in beside if pace and pace.step_tokens >= LEAST_CHUNK]
        taken_s = [pace.taken_s(self.to_compute(tracked, w)) for w, pace in paces if pace is not None]
        per_s = sum(1 / one_s for one_s in taken_s if one_s > 0)
        if per_s:
            self.pressure.came(tracked.lane[0], 1 / per_s, now)

    def arrives(self, request: Request, number: int, now: float) -> None:
        """One that is promised something was asked for, of that class."""
        self._promised.asked(number, self.targets(request).itl_s, now)

    # ------------------------------------------------------------ who

    def pick(self, tracked: Tracked, now: float, waiting: int = 0) -> tuple[Worker | None, Worker] | None:
        """The pair of workers for it, while so many wait in the queue; no prefill worker: the decode worker does both.
        None is "later". That is so in any case where there is no prefill worker that has not failed this request: often
        it was the way between the two, and it would fail again."""
        deciders = self.deciders(tracked)
        prefillers = self.prefillers(tracked)
        if not deciders:
            return None
        with_room = self._with_room(tracked, deciders, now)
        if not with_room:
            return None
        if not prefillers:
            local = self._pick_collocated(tracked, with_room, now)
            return None if local is None else (None, local)
        ways = self._ways(tracked, prefillers, now)
        local = self._pick_local(tracked, with_room, ways, now, waiting)
        if local is not None:
            return None, local
        prefill = self._pick_prefill(tracked, ways, now)
        return None if prefill is None else (prefill, self._pick_decode(tracked, with_room))

    def pick_other(self, tracked: Tracked, now: float) -> Worker | None:
        """A decode worker for a prompt that a prefill worker holds."""
        with_room = self._with_room(tracked, self.deciders(tracked), now)
        return self._pick_decode(tracked, with_room) if with_room else None

    def deciders(self, tracked: Tracked) -> list[Worker]:
        longest = tracked.request.max_total_tokens
        return [w for w in self._registry.usable("decode") if w.longest_tokens >= longest]

    def prefillers(self, tracked: Tracked) -> list[Worker]:
        return [
            w
            for w in self._registry.usable("prefill")
            if w.longest_tokens >= tracked.tokens and w.id not in tracked.avoid
        ]

    def _pick_prefill(self, tracked: Tracked, ways: Sequence[Way], now: float) -> Worker | None:
        fitting = {
            way.worker.id: way
            for way in ways
            if self._router.may_prefill(way.worker, way.tokens, tracked.lane[0])
        }
        workers = [way.worker for way in fitting.values()]
        untried = [w for w in workers if self._router.untried(w.id, now) and w.id not in tracked.avoid]
        return next(iter([*self._near(tracked, workers), *untried]), None) or least(
            workers, tracked.avoid, lambda w: fitting[w.id].first
        )

    def _pick_decode(self, tracked: Tracked, with_room: list[Worker]) -> Worker:
        found = next(iter(self._near(tracked, with_room)), None) or least(
            with_room,
            tracked.avoid,
            lambda w: self._router.batch_share(w) - AFFINITY * self._hit_share(tracked, w),
        )
        assert found is not None
        return found

    def _pick_collocated(self, tracked: Tracked, with_room: list[Worker], now: float) -> Worker | None:
        fitting = [
            w for w in with_room if self._router.may_prefill(w, self.to_compute(tracked, w), tracked.lane[0])
        ]
        near = next(iter(self._near(tracked, fitting)), None)
        if near is not None or not fitting:
            return near
        first = {way.worker.id: way.first for way in self._ways(tracked, fitting, now)}
        return least(
            sorted(fitting, key=self._router.batch_share), tracked.avoid, lambda w: first[w.id]
        )  # of those as soon as each other the one with the emptier batch

    def _near(self, tracked: Tracked, workers: list[Worker]) -> list[Worker]:
        """The one among them where a follower finds its prompt's KV, if nothing speaks against it."""
        family = tracked.family
        if family is None or not tracked.request.follows:
            return []
        has_it = (family.prefill, family.decode)
        return [w for w in workers if w.id in has_it and w.id not in tracked.avoid]

    # ------------------------------------------------------------ local prefill

    def _pick_local(
        self, tracked: Tracked, with_room: list[Worker], ways: Sequence[Way], now: float, waiting: int
    ) -> Worker | None:
        """A decode worker that should compute it though there are prefill workers."""
        if not self.local_prefill or tracked.request.scored_prompt_tokens:
            return None
        pools_take_s = [way.pace.taken_s(way.tokens) for way in ways if way.pace is not None]
        if len(pools_take_s) < len(ways):
            return None
        by_pair_s = min(way.first for way in ways)  # with room or without
        best, best_s = None, float("inf")
        gain = local_gain(tracked.plan)
        asked = Asked(None, self.left_s(tracked, now), tracked.plan, waiting)
        itl_s, guests_itl_s = self.targets(tracked.request).itl_s, self._promised.above(tracked.lane[0], now)
        for worker in with_room:
            local = self.local(worker, itl_s, guests_itl_s)
            if local is None or local.step_tokens < LEAST_CHUNK or worker.id in tracked.avoid:
                continue
            tokens, number = self.to_compute(tracked, worker), tracked.lane[0]
            ahead = self._router.prompts(worker.id)
            if ahead and not ahead.has_room(tokens, number, local.step_tokens):
                continue
            own_s = local.alone_s(tokens)
            first_s = ahead.seconds_ahead(number, tokens, own_s, now) + own_s
            second_s = first_s + self.row_step_s(worker)
            by_way_s = by_pair_s + self.gap_s(worker)
            if second_s >= min(best_s, gain * by_way_s):
                continue
            if any(self._is_to_be_tried(way, own_s, now) for way in ways):
                continue
            if worth(asked, by_pair_s, by_way_s - second_s, pools_take_s, local.harm_s(tokens)):
                best, best_s = worker, second_s
        return best

    def _is_to_be_tried(self, way: Way, own_s: float, now: float) -> bool:
        """A prefill worker that is thought slower than that because of steps long ago: nobody would ever be given to it
        again, nor be known to be as fast as it is."""
        slow = way.pace is not None and way.pace.alone_s(way.tokens) > SLOWER * own_s
        return slow and self._router.untried(way.worker.id, now)

    def may_be_local(self, worker: Worker) -> bool:
        """Whether prompts may be computed beside its batch, those of nobody in particular."""
        local = self.local(worker, None) if self.local_prefill else None
        return local is not None and local.step_tokens >= LEAST_CHUNK

    def local(self, worker: Worker, itl_s: float | None, guests_itl_s: float | None = None) -> Beside | None:
        """How it would compute prompts beside its batch, within the tightest of its targets and `itl_s`; where those
        leave no time, a little all the same. `guests_itl_s` is of those that may come to stand there. None where its
        step times are not known."""
        model = worker.load.step_model
        if not model or worker.card.whole_batches:
            return None
        rows = self._router.rows(worker.id)
        itls = [itl for itl in (rows.tightest_itl_s, itl_s) if itl is not None]
        budget = worker.card.max_num_batched_tokens
        chunk = local_chunk(model, len(rows), rows.context, budget, min(itls, default=None))
        if guests_itl_s is not None:
            beside = local_chunk(model, max(1, len(rows)), rows.context, budget, guests_itl_s)
            chunk = min(chunk, beside)
        row_step_s = gap_seconds(model, len(rows) + 1, rows.context)
        joins = 0.0
        if itls or guests_itl_s is not None:
            joins = self._handed_over_per_s() * (row_step_s + model[3] * chunk)
            chunk = int(chunk * left_of_chunk(joins))
        return Beside(max(chunk, LEAST_CHUNK - 1), row_step_s, model[3], len(rows), joins > 0)

    def _handed_over_per_s(self) -> float:
        """Prompts that come to each decode worker from the prefill workers, as those go on with what they have."""
        per_s = sum(self._router.prompts(worker.id).per_s for worker in self._registry.usable("prefill"))
        return per_s / max(1, len(self._registry.usable("decode")))

    def gap_s(self, worker: Worker) -> float:
        """From first to second token by way of a prefill worker."""
        return self._gap_s(worker, 0.5)

    def late_gap_s(self, worker: Worker) -> float:
        """One of the longer ones of these."""
        return self._gap_s(worker, LATE_GAP)

    def _gap_s(self, worker: Worker, share: float) -> float:
        usual_s = self.gaps.usual_s(share)
        return GAP_STEPS * self.row_step_s(worker) if usual_s is None else usual_s

    def row_step_s(self, worker: Worker) -> float:
        model = worker.load.step_model
        rows = self._router.rows(worker.id)
        return gap_seconds(model, len(rows) + 1, rows.context) if model else worker.load.step_s

    # ------------------------------------------------------------ what it takes

    def _ways(self, tracked: Tracked, workers: Sequence[Worker], now: float) -> list[Way]:
        """What is known of each of these that may compute its prompt, asked once."""
        in_seconds = all(w.load.step_model for w in workers)
        itl_s = self.targets(tracked.request).itl_s
        ways = []
        for worker in workers:
            tokens, ahead = self.to_compute(tracked, worker), self._router.prompts(worker.id)
            pace = self.pace(worker, itl_s)
            own_s = 0.0 if pace is None else pace.alone_s(tokens)
            first = float(ahead.tokens + tokens)
            if in_seconds:
                first = ahead.seconds_ahead(tracked.lane[0], tokens, own_s, now) + own_s
            ways.append(Way(worker, tokens, pace, first))
        return ways

    def pace(self, worker: Worker, itl_s: float | None) -> Pace | None:
        """How it computes prompts of those who are promised `itl_s`; None where its step times are not known."""
        model = worker.load.step_model
        if not model:
            return None
        local = self.local(worker, itl_s) if worker.role == "decode" else None
        return local or Chunks(model, worker.card.max_num_batched_tokens)

    def to_compute(self, tracked: Tracked, worker: Worker) -> int:
        """Tokens of it that are not in the worker's cache, by what is known here."""
        left = tracked.to_compute(worker.id, worker.card.block_size)
        if tracked.request.scored_prompt_tokens:
            return left
        return max(1, min(left, tracked.tokens - self.prefixes.hits(worker, tracked.chain)))

    def _hit_share(self, tracked: Tracked, worker: Worker) -> float:
        return self.prefixes.hits(worker, tracked.chain) / tracked.tokens

    def _blocks(self, tracked: Tracked, worker: Worker) -> int:
        block_size = worker.card.block_size
        return blocks_of(tracked.to_compute(worker.id, block_size), block_size)

    def share(self, tracked: Tracked, prefill: Worker | None, decode: Worker) -> Share:
        request = tracked.request
        computer = prefill or decode
        tokens = self.to_compute(tracked, computer)
        itl_s = self.targets(request).itl_s
        pace = self.pace(computer, itl_s)
        return Share(
            tokens,
            self._blocks(tracked, decode),
            0.0 if pace is None else pace.taken_s(tokens),
            tracked.lane[0],
            tracked.tokens + self.answer_left(tracked) // 2,
            itl_s,
            tracked.due,
        )

    def answer_left(self, tracked: Tracked) -> int:
        request = tracked.request
        expected = self.lengths.expected(request.tier, request.sampling.max_tokens)
        return max(1, expected - len(tracked.outputs))

    # ------------------------------------------------------------ room in a batch

    @property
    def full(self) -> bool:
        """No decode worker has a row for anybody: whoever is asked about, `pick` says "later"."""
        for worker in self._registry.usable("decode"):
            if len(self._router.rows(worker.id)) < worker.card.max_num_seqs:
                return False
        return True

    def _with_room(self, tracked: Tracked, workers: list[Worker], now: float) -> list[Worker]:
        itls_s = self._promised.all_above(tracked.lane[0], now)
        return [w for w in workers if self.rows_free(tracked, w, itls_s) > 0]

    def free_rows(self, tracked: Tracked, workers: list[Worker], now: float) -> int:
        """How many like this one there is room for in all these batches."""
        itls_s = self._promised.all_above(tracked.lane[0], now)
        return sum(max(0, self.rows_free(tracked, w, itls_s)) for w in workers)

    def rows_free(self, tracked: Tracked, worker: Worker, better_itls_s: list[float | None]) -> int:
        """How many like this one the worker's batch has room for, by rows, blocks and ITL targets. An empty one has."""
        rows, card = self._router.rows(worker.id), worker.card
        reserve = HEADROOM if better_itls_s else 0.0
        seats = card.max_num_seqs - math.ceil(reserve * card.max_num_seqs)
        blocks = int((1 - reserve) * card.blocks_total) - rows.blocks
        itls_s = (*better_itls_s, rows.tightest_itl_s, self.targets(tracked.request).itl_s)
        kept = [itl_s for itl_s in itls_s if itl_s is not None]
        if kept and worker.load.step_model:
            context = (rows.context + tracked.tokens) / (len(rows) + 1)
            seats = min(seats, rows_within(worker.load.step_model, min(kept), context))
        free = min(seats - len(rows), blocks // self._blocks(tracked, worker))
        return free if rows else max(1, free)
