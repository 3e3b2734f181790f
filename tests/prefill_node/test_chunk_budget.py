"""Steps of a lower class beside promised first tokens: the rule by itself, in the scheduler, and in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_worker import Shape, StepTime
from common.promised import GUESTS_FOR_S, MOST_GUESTS, Promised
from common.request import Request, RequestId, SamplingParams, pack_ids
from common.sequence import Sequence
from common.step_times import Coefficients, StepShape, seconds_of
from prefill_node.chunk_budget import OVERHEAD, SHARE, ChunkBudget
from prefill_node.scheduler import PrefillScheduler
from tests.common.stepping import attempt, make_core, model_for, prompt, request

MODEL: Coefficients = (0.02, 0.001, 0.0, 0.003)


def add(
    scheduler: PrefillScheduler, name: str, tokens: int, number: int, ttft_s: float | None = None
) -> Sequence:
    wanted = replace(request(name, prompt(tokens), 1, priority=number), ttft_s=ttft_s)
    return scheduler.add(wanted, attempt(), b"", 0.0)


def test_promises_are_those_of_higher_classes_and_of_late() -> None:
    promised = Promised()
    promised.asked(0, 1.0, 0.0)
    promised.asked(0, 0.5, 10.0)
    promised.asked(1, 0.1, 10.0)
    promised.asked(0, None, 10.0)
    assert [promised.above(number, 10.0) for number in (0, 1, 2)] == [None, 0.5, 0.1]
    assert promised.above(1, 10.0 + GUESTS_FOR_S) == 0.5 and promised.above(1, 11.0 + GUESTS_FOR_S) is None
    for number in range(MOST_GUESTS):
        promised.asked(5, 1.0 + number, 20.0)
    assert promised.above(5, 20.0) is None, "the table is bounded: the oldest are forgotten"


def test_a_lower_class_is_short_beside_a_promise_and_fills_what_is_left_of_it() -> None:
    """1 alone it has whole steps  2 somebody comes who is promised first tokens: its step is bound, with the other in
    it  3 he is done: still  4 nobody came for long: whole steps again."""
    core = make_core(4000, chunk=256, caching=False)
    scheduler, runner = PrefillScheduler(core), model_for(core)

    def step(model: Coefficients | None = MODEL, now: float = 0.0) -> dict[str, int]:
        batch = scheduler.schedule(now, model)
        assert batch is not None
        scheduler.finish(batch, runner.run(batch), now)
        return {str(seq.key[0]): count for seq, count in zip(batch.rows, batch.counts, strict=True)}

    add(scheduler, "flood", 3000, 1)
    assert step() == {"flood": 256}
    add(scheduler, "chat", 30, 0, ttft_s=1.0)
    within = int((SHARE * 1.0 - 0.021) / 0.003)
    assert step() == {"chat": 30, "flood": within - 30}
    assert step() == {"flood": within}
    assert step(model=None) == {"flood": 256}, "nothing is known of steps"
    add(scheduler, "long", 400, 0, ttft_s=1.0)
    assert step() == {"long": 256}, "a class does not bind itself, and leaves nothing here"
    assert step() == {"long": 144}
    assert step(now=GUESTS_FOR_S + 1) == {"flood": 256}


@pytest.mark.parametrize("ttft_s", [0.001, 0.05, 0.4, 1.0])
def test_a_step_is_never_mostly_overhead(ttft_s: float) -> None:
    scheduler = PrefillScheduler(make_core(4000, chunk=256))
    budget = ChunkBudget()
    budget.arrives(add(scheduler, "chat", 10, 0, ttft_s), 0.0)
    tokens = budget.within(add(scheduler, "flood", 10, 1), MODEL, 0.0)
    assert tokens is not None
    alone_s, step_s = (seconds_of(MODEL, StepShape(1, 0, chunk)) for chunk in (0, tokens))
    assert step_s <= max(SHARE * ttft_s, alone_s / OVERHEAD) < step_s + 0.003
    assert alone_s <= 1.03 * OVERHEAD * step_s, "of all its time"


TIME = StepTime(0.02, 0.001, 0.003)


def worst_first_token_s(ttft_s: float | None) -> float:
    """Of chats of 60 tokens, each alone, beside a flood of a lower class, whose whole step takes 0.8 s."""
    cluster = VirtualCluster(
        seed=3, num_prefill=1, num_decode=1, prefill_shape=Shape(4000), decode_shape=Shape(4000),
        step_time=TIME, decode_step_time=StepTime(), local_prefill=False,
    )  # fmt: skip
    cluster.run(until=1.0)
    worst_s = 0.0
    for index in range(60):
        ids = pack_ids(range(2000 * index, 2000 * index + 600))
        cluster.submit(Request(RequestId(f"f{index}"), ids, SamplingParams(2), FRONT, priority=1))
    for index in range(20):
        cluster.run(until=8.0 + 3.17 * index)
        ids = pack_ids(range(500_000 + 100 * index, 500_060 + 100 * index))
        asked = Request(RequestId(f"c{index}"), ids, SamplingParams(2), FRONT, ttft_s=ttft_s)
        answer = cluster.submit(asked)
        cluster.run(until=cluster.now + 3.0)
        worst_s = (
            max(worst_s, answer.stamps[0] - answer.submitted) if index else 0.0
        )  # the first comes unannounced
    return worst_s


def test_a_first_token_waits_for_a_short_step_of_a_lower_class() -> None:
    own_s, whole_s = 0.021 + 60 * 0.003, 0.021 + 256 * 0.003
    assert worst_first_token_s(None) > 1.2 * whole_s, "the flood leaves a gap: the test is blunt"
    assert worst_first_token_s(0.8) <= own_s + 2 * SHARE * 0.8
