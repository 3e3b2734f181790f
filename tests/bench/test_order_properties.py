"""What the order promises, tried on the prefill scheduler and through the whole cluster in virtual time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_model import VOCABULARY, continuation
from bench.virtual_network import Faults
from bench.virtual_worker import Shape, StepTime
from common.lifecycle import Phase
from common.ordering import AGEING_S, POLICIES, PolicyName
from common.request import Request, RequestId, SamplingParams, pack_ids
from common.shares import IN_COST, OUT_COST
from prefill_node.scheduler import PrefillScheduler
from tests.common.stepping import CHUNK, attempt, make_core, model_for, request

TOKEN_S = 0.0003
NET_S = 0.01


# ---------------------------------------------------------------- the prefill scheduler alone


@dataclass(frozen=True, slots=True)
class Prompt:
    at: float
    tokens: int
    priority: int = 0
    due: float | None = None


def done_at(prompts: Seq[Prompt], policy: PolicyName, step_s: float) -> list[float]:
    """When each is computed by a scheduler whose steps take `step_s` each, whatever is in them."""
    core = make_core(4000, max_num_seqs=200)
    scheduler, model = PrefillScheduler(core, POLICIES[policy]), model_for(core)
    coming = sorted(range(len(prompts)), key=lambda index: prompts[index].at)
    found = [0.0] * len(prompts)
    now = 0.0
    while coming or len(scheduler):
        while coming and prompts[coming[0]].at <= now:
            index = coming.pop(0)
            one = prompts[index]
            ids = [(index * 997 + position) % VOCABULARY for position in range(one.tokens)]
            deadline_s = None if one.due is None else max(0.0, one.due - now)
            made = replace(request(str(index), ids, 1, priority=one.priority), deadline_s=deadline_s)
            scheduler.add(made, attempt(), b"", now)
        batch = scheduler.schedule(now)
        if batch is None:
            now = prompts[coming[0]].at
            continue
        results = model.run(batch)
        now += step_s
        for outcome in scheduler.finish(batch, results, now):
            if outcome.token is not None:
                found[int(outcome.seq.key[0])] = now
                scheduler.end(outcome.seq.key, Phase.FINISHED, now)
    return found


PROMPTS = st.lists(
    st.builds(Prompt, st.floats(0, 30, allow_subnormal=False), st.integers(1, 4 * CHUNK)),
    min_size=1,
    max_size=25,
)


@given(PROMPTS, PROMPTS)
@settings(max_examples=60, deadline=None)
def test_a_higher_class_is_delayed_by_one_step_and_one_more_per_ageing_interval(
    high: list[Prompt], low: list[Prompt]
) -> None:
    """Beside a lower class and alone. What all of them need is done at most so much later."""
    step_s = 0.2
    alone = done_at(high, "fair", step_s)
    together = done_at([*high, *(replace(one, priority=1) for one in low)], "fair", step_s)[: len(high)]
    for last in range(len(high)):
        until = sorted(alone)[last]
        limit = 1 + (sorted(together)[last] - min(one.at for one in high)) // AGEING_S + 1
        assert sorted(together)[last] <= until + limit * step_s + 1e-9


@given(PROMPTS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_deadlines_that_any_order_meets_are_met_with_a_chunk_of_slack(
    prompts: list[Prompt], random: Random
) -> None:
    """What a run by drawn classes comes to is the deadline, and a step. (All within an ageing interval.)"""
    step_s = 0.02
    near = [replace(one, at=one.at / 30, priority=random.randrange(100)) for one in prompts]
    reached = done_at(near, "priority", step_s)
    due = [replace(one, priority=0, due=when + step_s) for one, when in zip(near, reached, strict=True)]
    for policy in ("edf", "fair"):
        for found, one in zip(done_at(due, policy, step_s), due, strict=True):
            assert one.due is not None and found <= one.due + 1e-9, policy


@pytest.mark.parametrize("policy", POLICIES)
def test_BR_067_a_prompt_of_two_hundred_chunks_and_one_of_twenty_tokens_now_and_then(
    policy: PolicyName,
) -> None:
    """The short ones take few steps each; the long one goes on at half speed at least."""
    long = Prompt(0.0, 200 * CHUNK)
    shorts = [Prompt(1.0 + 5 * number, CHUNK // 2) for number in range(100)]
    done, *others = done_at([long, *shorts], policy, 1.0)
    assert max(found - one.at for found, one in zip(others, shorts, strict=True)) <= 2.0
    assert 200 + 20 <= done <= 200 + 25, "half a step for each short one"
    many = [Prompt(float(number), CHUNK // 2) for number in range(500)]
    done, *others = done_at([long, *many], policy, 1.0)
    assert done <= 400 and max(found - one.at for found, one in zip(others, many, strict=True)) <= 2.0


@pytest.mark.parametrize("policy", ["edf", "fair"])
def test_a_long_prompt_that_is_due_leaves_nothing_to_what_is_due_later(policy: PolicyName) -> None:
    """Six chunks that have seven steps, and short ones that would take half of each. Once it is late, they do."""
    shorts = [Prompt(0.5 + number, CHUNK // 2, due=100.0) for number in range(10)]
    assert done_at([Prompt(0.0, 6 * CHUNK, due=7.0), *shorts], policy, 1.0)[0] == 6.0
    assert done_at([Prompt(0.0, 6 * CHUNK, due=1.5), *shorts], policy, 1.0)[0] > 7.0


# ---------------------------------------------------------------- the cluster


class Run:
    """Requests at their times, and what became of them. Steps take TOKEN_S for each token; the decode pool has room."""

    def __init__(self, policy: PolicyName = "fair", *, step_time: StepTime | None = None) -> None:
        self.cluster = VirtualCluster(
            seed=1,
            num_prefill=1,
            num_decode=1,
            prefill_shape=Shape(num_blocks=4096, max_num_seqs=256, prefix_caching=False),
            decode_shape=Shape(num_blocks=1 << 16, max_num_seqs=4000, prefix_caching=False),
            step_time=step_time or StepTime(0.0, 0.0, TOKEN_S),
            faults=Faults(delay_s=(0.0001, 0.0005)),
            policy=policy,
        )
        self.cluster.run(until=1.0)
        self.asked: dict[str, tuple[float, Request]] = {}

    def ask(
        self, name: str, at: float, tokens: int, out: int = 1, *, due: float | None = None, **fields: object
    ) -> None:
        random = Random(name)
        ids = [random.randrange(VOCABULARY) for _ in range(tokens)]
        made = Request(RequestId(name), pack_ids(ids), SamplingParams(out), FRONT, **fields)  # type: ignore[arg-type]
        if due is not None:
            made = replace(made, deadline_s=due - at)
        self.asked[name] = (at, made)
        self.cluster.at(at, lambda: self._submit(made))

    def _submit(self, made: Request) -> None:
        self.cluster.submit(made)

    def answer(self, name: str) -> Answer:
        return self.cluster.answers[RequestId(name)]

    def ttft_s(self, name: str) -> float:
        return self.answer(name).stamps[0] - self.asked[name][0]


def poisson(random: Random, rate: float, start: float, end: float) -> list[float]:
    times, at = [], start
    while (at := at + random.expovariate(rate)) < end:
        times.append(at)
    return times


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


TOKENS = 240
CAPACITY = 1 / (TOKENS * TOKEN_S)
"""Prompts a second."""


def calm_tenants_ttft_s(times_share: float, seed: int) -> list[float]:
    """Of a tenant somewhat below its half, its prompts about evenly spaced, beside one at so many times its own."""
    run = Run()
    random = Random(seed)
    calm, at = [], 1.0
    while (at := at + random.uniform(0.5, 1.5) / (0.45 * CAPACITY)) < 21.0:
        calm.append(at)
    for number, when in enumerate(calm):
        run.ask(f"calm{number}", when, TOKENS, tenant="calm")
    for number, when in enumerate(poisson(random, times_share * 0.5 * CAPACITY, 1.0, 21.0)):
        run.ask(f"other{number}", when, TOKENS, tenant="other")
    run.cluster.run(until=25.0)
    return [run.ttft_s(f"calm{number}") for number in range(len(calm))]


@pytest.mark.parametrize("seed", range(2))
def test_a_tenant_at_twenty_times_its_share_does_not_slow_another(seed: int) -> None:
    """One that keeps to its own: what it could borrow beyond that, while the other leaves it, is not promised."""
    fair, flooded = calm_tenants_ttft_s(1.0, seed), calm_tenants_ttft_s(20.0, seed)
    assert p99(flooded) <= 1.2 * p99(fair), (p99(fair), p99(flooded))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 4.0)])
def test_service_of_two_that_both_wait(weights: tuple[float, float]) -> None:
    """At every moment, as clients see it, and by the coordinator's account."""
    run = Run()
    random = Random(5)
    for place, tenant in enumerate("ab"):
        for number in range(300):
            tokens, out = random.randint(1, 300), random.randint(1, 12)
            run.ask(f"{tenant}{number}", 1.0, tokens, out, tenant=tenant, tier=tenant, weight=weights[place])
    longest, batch = 300, 2 * 256 * 12 // 100
    bound = 2 * max(IN_COST * longest, OUT_COST * batch * 12) / min(weights)
    shares = run.cluster.cluster.queue.shares
    start: list[float] | None = None
    for tick in range(1, 100):
        run.cluster.run(until=1.0 + tick * 0.1)
        queue = run.cluster.cluster.queue
        if not all(queue.waiting_of(tenant) for tenant in "ab"):
            break
        counters = [shares.counter((0, tenant, tenant)) for tenant in "ab"]
        start = start or counters
        assert abs((counters[0] - start[0]) - (counters[1] - start[1])) <= bound
    assert tick > 20, "they do not wait long enough to tell"


def test_a_higher_class_through_the_cluster() -> None:
    """A lower class floods both pools' queues. One step of the worker is what it costs a higher one, and another for
    every aged turn."""
    step = StepTime(0.05, 0.0, 0.0)

    def run_with(flood: bool) -> list[float]:
        run = Run(step_time=step)
        random = Random(3)
        times = poisson(random, 4.0, 2.0, 20.0)
        for number, at in enumerate(times):
            run.ask(f"high{number}", at, random.choice((20, 200, 900)), priority=-1)
        if flood:
            for number, at in enumerate(poisson(random, 60.0, 1.0, 20.0)):
                run.ask(f"low{number}", at, random.choice((20, 200, 900)), tenant=f"t{number % 7}")
        run.cluster.run(until=24.0)
        return [run.ttft_s(f"high{number}") for number in range(len(times))]

    alone, flooded = run_with(False), run_with(True)
    later = [b - a for a, b in zip(alone, flooded, strict=True)]
    assert max(later) <= 2 * step.base_s + NET_S, "a step, and an aged turn"
    assert sum(one > step.base_s + NET_S for one in later) <= 20 / AGEING_S + 1


def test_no_wait_through_the_cluster_is_beyond_the_bound() -> None:
    """Four of the last class beside a flood of the first that takes all there is."""
    run = Run(step_time=StepTime(0.05, 0.0, 0.0))
    random = Random(4)
    for number, at in enumerate(poisson(random, 30.0, 1.0, 60.0)):
        run.ask(f"high{number}", at, 200, priority=-1)
    for number in range(4):
        run.ask(f"low{number}", 2.0 + number, 200)
    run.cluster.run(until=120.0)
    waits = [run.ttft_s(f"low{number}") for number in range(4)]
    assert waits[0] > AGEING_S, "the flood does not hold it up"
    # In the queue, and on the worker again; those high ones that came before it are few, and gone soon.
    assert max(waits) <= 2 * (4 + 2) * (AGEING_S + 0.1)


def test_deadlines_through_the_cluster() -> None:
    """What drawn classes come to, given as deadlines with three chunks of slack (one on its way, two ahead of it at the
    worker) and what messages take, edf comes to as well."""
    random = Random(6)
    chunk_s = 256 * TOKEN_S
    asked = [(1.0 + random.uniform(0, 3), random.randint(20, 250), random.randrange(50)) for _ in range(80)]
    first = Run("priority")
    for number, (at, tokens, priority) in enumerate(asked):
        first.ask(str(number), at, tokens, priority=priority)
    first.cluster.run(until=30.0)
    second = Run("edf")
    due = [at + first.ttft_s(str(number)) + 3 * chunk_s + NET_S for number, (at, _, _) in enumerate(asked)]
    for number, (at, tokens, _) in enumerate(asked):
        second.ask(str(number), at, tokens, due=due[number])
    second.cluster.run(until=30.0)
    late = [at + second.ttft_s(str(n)) - due[n] for n, (at, _, _) in enumerate(asked)]
    assert max(late) <= 0, late


def test_an_expired_request_is_freed_everywhere() -> None:
    """Its deadline passes in the queue, and in the middle of its prompt at the worker."""
    run = Run(step_time=StepTime(0.2, 0.0, 0.0))
    ids = list(range(2000))
    long = Request(RequestId("long"), pack_ids(ids), SamplingParams(4), FRONT)
    for name, deadline_s in (("long", 0.7), ("waits", 0.3)):
        run.cluster.submit(replace(long, request_id=RequestId(name)), deadline_s)
    other = run.cluster.submit(replace(long, request_id=RequestId("other"), prompt_ids=pack_ids(ids[:500])))
    run.cluster.run(until=2.2)
    assert [run.answer(name).end for name in ("long", "waits")] == ["DeadlinePassed"] * 2
    run.cluster.run(until=20.0)
    assert other.ids == continuation(ids[:500], 4)
    run.cluster.check_idle()


# ---------------------------------------------------------------- a full cache


@pytest.mark.parametrize("others", (3, 8))
def test_a_full_cache_keeps_no_higher_class_waiting(others: int) -> None:
    """Those of the lower class want several times the cache, and put each other out; the one of the higher class goes
    through at once, without a gap, and nobody's answer is another for it."""
    shape = Shape(num_blocks=40, max_num_seqs=8)
    cluster = VirtualCluster(seed=1, num_prefill=1, num_decode=1, prefill_shape=shape, decode_shape=shape)
    cluster.run(until=1.0)
    asked: list[tuple[list[int], int, Answer]] = []

    def submit(name: str, priority: int, tokens: int, max_tokens: int) -> Answer:
        ids = [(len(asked) * 997 + position) % VOCABULARY for position in range(tokens)]
        made = Request(
            RequestId(name), pack_ids(ids), SamplingParams(max_tokens=max_tokens), FRONT, priority=priority
        )
        answer = cluster.submit(made)
        asked.append((ids, max_tokens, answer))
        return answer

    for number in range(others):
        submit(f"low-{number}", 2, 40, 300)
    cluster.run(until=6.0)
    high = submit("high", 0, 89, 20)
    cluster.run(until=400.0)
    for ids, max_tokens, answer in asked:
        assert answer.end == "length" and answer.ids == continuation(ids, max_tokens)
    gaps_s = [after - before for before, after in zip(high.stamps, high.stamps[1:], strict=False)]
    assert high.stamps[0] - high.submitted < 0.5 and max(gaps_s) < 0.5, (
        high.stamps[0] - high.submitted,
        gaps_s,
    )
