"""What the queue promises, tried with Hypothesis in virtual time: a bound on any wait, and one on unfairness."""

from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import given, settings, strategies as st

from common.ordering import AGEING_S, POLICIES, PolicyName
from common.shares import IN_COST, OUT_COST
from coordinator.lanes import Entry
from coordinator.queue import WaitingQueue
from tests.coordinator.test_queue import NEVER, entry, in_order

Arrival = tuple[float, int, int, float]
ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 4.0), st.integers(-1, 3), st.integers(0, 2), st.floats(0.1, 30.0)), max_size=60
)


def first_of(queue: WaitingQueue, now: float) -> Entry:
    ((_, first),) = in_order(queue, 1, lambda _: True, now)
    return first


@given(ARRIVALS, st.sampled_from(list(POLICIES)), st.floats(0.05, 8.0))
@settings(max_examples=120, deadline=None)
def test_no_wait_is_beyond_the_bound(arrivals: list[Arrival], policy: PolicyName, gap_s: float) -> None:
    """One is given out every `gap_s`. With k that came before it, (k + 2) times an ageing interval and a gap."""
    queue = WaitingQueue(max_requests=1000, max_tokens=1 << 40, policy=POLICIES[policy])
    bounds: dict[str, float] = {}
    coming: deque[Entry] = deque()
    at = 0.0
    for number, (after_s, priority, tenant, due_s) in enumerate(arrivals):
        at += after_s
        made = entry(
            number,
            priority,
            1 + number % 50,
            at,
            policy=policy,
            tenant=f"t{tenant}",
            due=at + due_s if tenant else NEVER,
        )
        coming.append(made)
    now = 0.0
    while coming or not queue.empty:
        now += gap_s
        while coming and coming[0].since <= now:
            bounds[coming[0].id] = (len(queue) + 2) * (AGEING_S + gap_s)
            queue.push(coming.popleft())
        if not queue.empty:
            first = first_of(queue, now)
            queue.give_out(first, now)
            assert now - first.since <= bounds[first.id]


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40)), min_size=20, max_size=120),
    st.sampled_from([(1.0, 1.0), (1.0, 4.0), (0.5, 3.0)]),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_two_tenants_that_always_wait_are_never_further_apart_than_the_bound(
    sizes: list[tuple[int, int]], weights: tuple[float, float], slots: int, random: Random
) -> None:
    """A batch of `slots`, whose answers grow by a token each step: service by weight since the start differs by at
    most 2 U, U = max(IN_COST x longest prompt, OUT_COST x answer tokens that the batch may still come to) / weight."""
    queue = WaitingQueue(max_requests=10_000, max_tokens=1 << 40)
    tenants = ("a", "b")
    answers: dict[str, int] = {}
    for number, (prompt_tokens, answer_tokens) in enumerate([*sizes, *sizes, *sizes, *sizes]):
        for place, tenant in enumerate(tenants):
            made = entry(
                number + 10_000 * place, 0, prompt_tokens, tenant=tenant, weight=weights[place], tier=tenant
            )
            queue.push(made)
            answers[made.id] = answer_tokens
    longest = max(size for size, _ in sizes)
    batch_tokens = slots * max(out for _, out in sizes)
    bound = 2 * max(IN_COST * longest, OUT_COST * batch_tokens) / min(weights)
    service = dict.fromkeys(tenants, 0.0)
    running: list[tuple[Entry, list[int]]] = []
    while all(queue.waiting_of(tenant) for tenant in tenants):
        while len(running) < slots and all(queue.waiting_of(tenant) for tenant in tenants):
            first = first_of(queue, 0.0)
            queue.give_out(first, 0.0)
            service[first.tier] += first.cost
            running.append((first, [answers[first.id]]))
        for one, left in running:
            weight = weights[tenants.index(one.tier)]
            queue.shares.charge(one.lane, OUT_COST / weight)
            service[one.tier] += OUT_COST / weight
            left[0] -= 1
        running = [(one, left) for one, left in running if left[0]]
        assert abs(service["a"] - service["b"]) <= bound
