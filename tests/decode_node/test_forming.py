"""Request-level batches in virtual time: nobody joins one that runs, it starts when it may and not before, all end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from common.lifecycle import Phase
from common.request import Key
from common.sequence import Sequence
from decode_node.forming import AT_ONCE, STATIC_LIMIT_S, Continuous, RequestLevel
from decode_node.scheduler import DecodeScheduler
from tests.common.stepping import attempt, check_whole, expected, make_core, model_for, prompt, request

SIZE = 4
STEP_S = 0.25


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt_len: int
    max_tokens: int
    leaves_after: float | None = None


@dataclass
class Run:
    """A scheduler driven as the worker's loop does: at arrivals, at the ends of steps, and when it asks to be."""

    forming: Continuous | RequestLevel
    arrivals: list[Arrival]
    num_blocks: int = 64
    batches: list[tuple[float, list[Key]]] = field(default_factory=list)  # who started together, and when
    began: dict[Key, float] = field(default_factory=dict)
    ended: dict[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = make_core(self.num_blocks, max_num_seqs=SIZE)
        self.scheduler = DecodeScheduler(self.core, self.forming)
        self.model = model_for(self.core)
        self.came: dict[Key, Arrival] = {}
        self.answers: dict[Key, list[int]] = {}
        self.free_since = 0.0  # nobody of a batch is left

    def to_the_end(self) -> None:
        now, todo = 0.0, sorted(self.arrivals, key=lambda arrival: arrival.at)
        while todo or len(self.scheduler.held):
            while todo and todo[0].at <= now:
                self._add(todo.pop(0), now)
            self._let_leave(now)
            asked = self._step(now)
            if asked is None:
                now += STEP_S
                continue
            if not todo and not len(self.scheduler.held):
                return
            times = [asked, *(arrival.at for arrival in todo[:1]), *self._leaving_times(now)]
            assert min(times) < float("inf"), "somebody waits for nothing"
            now = max(now, min(times))

    def _add(self, arrival: Arrival, now: float) -> None:
        ids = prompt(arrival.prompt_len)
        wanted = request(f"r{len(self.came)}", ids, arrival.max_tokens)
        seq = self.scheduler.add(wanted, attempt(), b"", now)
        self.came[seq.key], self.answers[seq.key] = arrival, []

    def _leaving_times(self, now: float) -> list[float]:
        leaving = [
            (a.at + a.leaves_after)
            for k, a in self.came.items()
            if a.leaves_after and k in self.scheduler.held
        ]
        return [time for time in leaving if time > now]

    def _let_leave(self, now: float) -> None:
        for key, arrival in self.came.items():
            if (
                arrival.leaves_after is not None
                and arrival.at + arrival.leaves_after <= now
                and key in self.scheduler.held
            ):
                self._end(key, Phase.ABORTED, now)

    def _end(self, key: Key, phase: Phase, now: float) -> None:
        self.scheduler.end(key, phase, now)
        self.ended[key] = now
        if not self._running():
            self.free_since = now

    def _running(self) -> list[Sequence]:
        return [seq for seq in self.scheduler.held.sequences() if seq.life.phase is not Phase.QUEUED]

    def _step(self, now: float) -> float | None:
        """One step at `now`, which ends STEP_S later; or, where there is none, when to come again."""
        beside = self._running()
        waiting = [seq for seq in self.scheduler.held.sequences() if seq.life.phase is Phase.QUEUED]
        batch = self.scheduler.schedule(now)
        new = [seq for seq in self.scheduler.started if seq.preemptions == 0]
        self.scheduler.started.clear()
        self.scheduler.giving_way.put_out.clear()
        if new:
            self._check_start(new, waiting, beside, now)
        if batch is None:
            return float("inf") if self.scheduler.opens_at is None else self.scheduler.opens_at
        for seq, result, finish in self.scheduler.finish(batch, self.model.run(batch), now + STEP_S):
            self.answers[seq.key] += result.ids
            if finish is not None:
                self._end(seq.key, Phase.FINISHED, now + STEP_S)
        return None

    def _check_start(
        self, new: list[Sequence], waiting: list[Sequence], beside: list[Sequence], now: float
    ) -> None:
        self.batches.append((now, [seq.key for seq in new]))
        self.began |= {seq.key: now for seq in new}
        if isinstance(self.forming, Continuous):
            return
        assert not beside, "joined a batch that runs"
        oldest = min(self.came[seq.key].at for seq in waiting)
        limit_s = self.forming.timeout_s or STATIC_LIMIT_S
        if len(waiting) < SIZE:
            assert now >= oldest + limit_s, "started before it was full or anybody had waited for the timeout"
        assert now <= max(self.free_since, oldest + limit_s) + STEP_S, "kept waiting without a reason"


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 160).map(lambda quarter: quarter / 4),
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 12),
        leaves_after=st.none() | st.integers(1, 40).map(float),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([14, 64]))
def test_whole_batches_start_in_time_and_all_of_them_end(
    them: list[Arrival], timeout_s: float, num_blocks: int
) -> None:
    """With 14 blocks one request just fits alone: members are left out, and put out and computed again."""
    run = Run(RequestLevel(SIZE, timeout_s), them, num_blocks)
    run.to_the_end()
    assert set(run.ended) == set(run.came) and len(run.came) == len(them)
    for key, arrival in run.came.items():
        wanted = expected(prompt(arrival.prompt_len), arrival.max_tokens)
        answer = run.answers[key]
        assert answer == wanted[: len(answer)]
        assert arrival.leaves_after is not None or answer == wanted
    check_whole(run.core)


def batches_of(forming: Continuous | RequestLevel, *at: float) -> list[tuple[float, int]]:
    run = Run(forming, [Arrival(time, 4, 4) for time in at])
    run.to_the_end()
    return [(time, len(keys)) for time, keys in run.batches]


def test_dynamic_is_full_or_out_of_time() -> None:
    """Four tokens are four steps, so a batch lasts a second."""
    dynamic = RequestLevel(SIZE, 0.5)
    assert batches_of(dynamic, 0, 0, 0, 0) == [(0, 4)], "full at once"
    assert batches_of(dynamic, 0, 0.25, 0.75) == [(0.5, 2), (1.5, 1)], (
        "the timer of the first; no third joins"
    )
    assert batches_of(dynamic, 0, 0, 0, 0, 0, 0) == [(0, 4), (1.0, 2)], "time spent behind a batch counts"


def test_static_waits_for_a_full_batch_and_not_for_ever() -> None:
    static = RequestLevel(SIZE, 0.0)
    assert batches_of(static, 0, 1, 2, 9) == [(9, 4)]
    assert batches_of(static, 0, 1, 2, 9, 9) == [(9, 4), (9 + STATIC_LIMIT_S, 1)]


def test_continuous_lets_everybody_in_at_the_next_step() -> None:
    assert batches_of(Continuous(), 0, 0.25, 0.75) == [(0, 1), (0.25, 1), (0.75, 1)]
    assert Continuous().opens_at([], 7) == AT_ONCE


@pytest.mark.parametrize("forming", [RequestLevel(SIZE, 0.5), RequestLevel(SIZE, 0.0)])
def test_nothing_is_asked_for_while_nobody_waits(forming: RequestLevel) -> None:
    assert forming.opens_at([], 0) is None and forming.opens_at([], 3) is None
