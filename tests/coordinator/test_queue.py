"""The queue: order, bounds, ageing, and a count of tokens that adds up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings, strategies as st

from common.ordering import AGEING_S, POLICIES, PolicyName
from common.request import FrontId, Request, RequestId, SamplingParams
from common.shares import OUT_COST
from coordinator.lanes import LEVELLED, Entry, Rank
from coordinator.queue import WaitingQueue

ROOM = 10_000
NEVER = float("inf")


def queue_of(policy: PolicyName = "fair", max_requests: int = 10, max_tokens: int = 1000) -> WaitingQueue:
    return WaitingQueue(max_requests=max_requests, max_tokens=max_tokens, policy=POLICIES[policy])


def entry(
    arrival: int,
    priority: int = 0,
    tokens: int = 10,
    since: float = 0.0,
    *,
    policy: PolicyName = "fair",
    due: float = NEVER,
    tenant: str = "",
    tier: str = "t",
    weight: float = 1.0,
) -> Entry:
    name = RequestId(f"r{arrival}")
    request = Request(name, b"", SamplingParams(1), FrontId("f"), priority, tier, tenant, weight=weight)
    order = POLICIES[policy]
    lane, place = order.lane(request), order.place(due, arrival)
    return Entry(name, lane, place, tokens, since, cost=tokens / weight, tier=tier)


def in_order(
    queue: WaitingQueue, count: int, wanted: Callable[[Entry], bool], now: float
) -> list[tuple[Rank, Entry]]:
    with closing(queue.in_order(wanted, now)) as order:
        return list(islice(order, count))


def ahead(queue: WaitingQueue, count: int = 100, room: int = ROOM, now: float = 0.0) -> list[Entry]:
    return [one for _, one in in_order(queue, count, lambda one: one.longest <= room, now)]


def order(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    return [one.place[1] for one in ahead(queue, now=now)]


def served(queue: WaitingQueue, count: int, now: float = 0.0) -> list[Entry]:
    """Given out one after the other, each on a look of its own."""
    given = []
    for _ in range(count):
        (first,) = ahead(queue, 1, now=now)
        queue.give_out(first, now)
        given.append(first)
    return given


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [1, 2, 3, 4, 5, 6]),
        ("priority", [3, 2, 4, 5, 6, 1]),
        # Tenant a had its first, so b is next; of b's, the one that is due first.
        ("fair", [3, 2, 5, 4, 6, 1]),
        ("edf", [3, 6, 5, 2, 4, 1]),
    ],
)
def test_each_policy(policy: PolicyName, expected: list[int]) -> None:
    queue = queue_of(policy)
    for arrival, priority, tenant, due in (
        (1, 1, "a", 1.0), (2, 0, "a", 9.0), (3, -1, "b", NEVER), (4, 0, "a", NEVER), (5, 0, "b", 8.0), (6, 0, "b", 7.0),
    ):  # fmt: skip
        queue.push(entry(arrival, priority, tenant=tenant, due=due, policy=policy))
    if policy == "fair":
        expected = [3, 6, 2, 5, 4, 1]  # 6 is due before 2, and neither tenant of the class was served
    assert order(queue) == expected
    assert [one.place[1] for one in served(queue, 6)] == expected and queue.empty


def test_lanes_alternate_by_what_they_were_served_and_by_weight() -> None:
    queue = queue_of(max_requests=100, max_tokens=10_000)
    for number in range(20):
        queue.push(entry(number, tenant="a"))
        queue.push(entry(100 + number, tenant="b", tier="gold", weight=3.0))
    assert [one.tier for one in served(queue, 20)].count("gold") == 15
    queue.shares.charge((0, "gold", "b"), 55.0)
    assert [one.tier for one in served(queue, 7)] == ["t"] * 6 + ["gold"], "what was answered counts too"


def test_who_was_away_gets_no_credit_for_it() -> None:
    queue = queue_of(max_requests=100, max_tokens=10_000)
    for number in range(30):
        queue.push(entry(number, tenant="stays"))
    served(queue, 20)
    for number in range(100, 110):
        queue.push(entry(number, tenant="comes"))
    tenants = [one.lane[2] for one in served(queue, 10)]
    assert tenants.count("comes") == 5 and tenants[:2] == ["stays", "comes"], "as if it had been there"


def test_who_comes_when_nobody_waits_is_lifted_to_who_left_last() -> None:
    queue = queue_of(max_requests=100, max_tokens=10_000)
    for number in range(9):
        queue.push(entry(number, tenant="first"))
    served(queue, 9)
    for number in range(10):
        queue.push(entry(100 + number, tenant="second"))
        queue.push(entry(200 + number, tenant="first"))
    tenants = [one.lane[2] for one in served(queue, 10)]
    assert tenants.count("second") == 5


def test_who_fits_nobody_that_is_left_is_in_nobodys_way() -> None:
    queue = queue_of()
    for arrival in range(1, 6):
        queue.push(replace(entry(arrival), longest=100 if arrival < 4 else 20))
    assert [one.place[1] for one in ahead(queue, 2, 20)] == [4, 5]
    assert [one.place[1] for one in ahead(queue, 2, 100)] == [1, 2]


def test_who_comes_back_stands_where_it_stood() -> None:
    queue = queue_of()
    for arrival in (1, 2, 3):
        queue.push(entry(arrival))
    assert queue.remove(RequestId("r1")) is not None
    queue.push(entry(4))
    queue.push(entry(1))
    assert order(queue) == [1, 2, 3, 4]


def test_bounds() -> None:
    queue = queue_of(max_requests=2, max_tokens=100)
    assert queue.full_for(1, 5000) is None, "one request always can"
    queue.push(entry(1, tokens=60))
    assert queue.full_for(1, 40) is None
    reason = queue.full_for(1, 41)
    assert reason is not None and "60 prompt tokens" in reason
    queue.push(entry(2, tokens=1))
    reason = queue.full_for(1, 1)
    assert reason is not None and "the limit is 2" in reason


def test_a_tier_has_a_bound_of_its_own() -> None:
    queue = WaitingQueue(max_requests=10, max_tokens=1000, tier_limits={"batch": 2})
    queue.push(entry(1, tier="batch"))
    queue.hold(entry(2, tier="batch"))
    reason = queue.full_for(1, 1, "batch")
    assert reason is not None and "2 requests of tier batch" in reason
    assert queue.full_for(1, 1, "default") is None and queue.full_for(1, 1) is None
    never = queue.never_fits(3, 1, "batch")
    assert never is not None and "2 requests that may wait here in tier batch (its max_queue)" in never
    assert queue.never_fits(3, 1) is None and "tier" not in str(queue.never_fits(11, 1))
    queue.remove(RequestId("r2"))
    assert queue.full_for(1, 1, "batch") is None and queue.waiting_of("batch") == 1


def test_age_is_of_who_waits_longest() -> None:
    queue = queue_of(max_tokens=100)
    assert queue.age_s(5.0) == 0.0
    queue.push(entry(1, since=2.0))
    queue.push(entry(2, priority=-1, since=4.0))
    assert queue.age_s(5.0) == 3.0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_aged_turn_in_an_interval_and_the_oldest_has_it(policy: PolicyName) -> None:
    """Two of the last class beside a flood of the first, which is given one every tenth of a second."""
    queue = queue_of(policy, max_requests=1000, max_tokens=100_000)
    queue.push(entry(1, 5, policy=policy, tenant="low"))
    queue.push(entry(2, 5, since=0.1, policy=policy, tenant="low"))
    turns = []
    for tick in range(1, 300):
        now = tick / 10
        for arrival in (10 * tick, 10 * tick + 1):  # twice what is given out: these age too
            queue.push(entry(arrival, 0, since=now, policy=policy, due=now + 1))
        (given,) = served(queue, 1, now)
        if given.place[1] in (1, 2):
            turns.append((given.place[1], now))
    if policy == "fcfs":
        assert turns == [(1, 0.1), (2, 0.2)]
    else:
        assert turns == [(1, AGEING_S), (2, 2 * AGEING_S)]


def test_an_aged_one_that_is_given_out_in_its_own_order_takes_nobodys_turn() -> None:
    """The oldest finds no room: others that have waited long too are given out meanwhile, and it stays the first."""
    queue = queue_of(max_requests=100)
    queue.push(entry(1, 5))
    for arrival in range(2, 8):
        queue.push(entry(arrival, 0, since=0.5))
    for _ in range(3):
        assert order(queue, now=9.0)[0] == 1
        queue.give_out(ahead(queue, now=9.0)[1], 9.0)
    queue.give_out(ahead(queue, now=9.0)[0], 9.0)
    assert order(queue, now=9.1) == [5, 6, 7]


def test_a_newcomer_with_an_earlier_deadline_takes_its_lane_along() -> None:
    """Tenants that were served alike: the one is next whose first is due first."""
    queue = queue_of()
    for arrival, tenant, due in ((1, "b", NEVER), (2, "c", NEVER), (3, "a", NEVER), (4, "a", 5.0)):
        queue.push(entry(arrival, tenant=tenant, due=due))
    assert order(queue) == [4, 1, 2, 3]


def test_rank_is_where_it_would_be_served() -> None:
    queue = queue_of(max_requests=100)
    for arrival, tenant in ((1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "b")):
        queue.push(entry(arrival, tenant=tenant))
    found = in_order(queue, 10, lambda _: True, 0.0)
    assert [rank for rank, _ in found] == sorted(rank for rank, _ in found)
    for rank, one in found:
        assert queue.rank(one, within=9) == rank
    assert queue.rank(found[-1][1], within=1) is None or queue.rank(found[-1][1], within=1) == found[-1][0]


Step = tuple[str, int, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "remove", "give", "charge"]),
        st.integers(0, 15),
        st.integers(-1, 1),
        st.integers(0, 3),
        st.integers(1, 50),
    ),
    max_size=60,
)


def by_the_book(waiting: dict[RequestId, Entry], queue: WaitingQueue) -> list[Entry]:
    """The order, worked out anew from every lane's counter: the least rank, then the next, as if given out."""
    left, extra, found = dict(waiting), dict[tuple[int, str, str], float](), []
    while left:
        first = min(
            left.values(),
            key=lambda one: (
                one.lane[0],
                queue.shares.counter(one.lane) + extra.get(one.lane, 0.0),
                _head(one, left),
            ),
        )
        lane = [one for one in left.values() if one.lane == first.lane]
        first = min(lane, key=lambda one: one.place)
        extra[first.lane] = extra.get(first.lane, 0.0) + first.cost
        found.append(first)
        del left[first.id]
    return found


def _head(one: Entry, left: dict[RequestId, Entry]) -> tuple[float, int]:
    return min(other.place for other in left.values() if other.lane == one.lane)


@given(STEPS, st.sampled_from(list(POLICIES)))
@settings(max_examples=150, deadline=None)
def test_against_a_list(steps: list[Step], policy: PolicyName) -> None:
    queue = queue_of(policy, 100, 10_000)
    model: dict[RequestId, Entry] = {}
    for what, arrival, priority, tenant, tokens in steps:
        due = NEVER if arrival % 3 else float(tokens)
        one = entry(
            arrival, priority, tokens, policy=policy, tenant=f"t{tenant}", due=due, weight=1.0 + tenant
        )
        if what == "push" and one.id not in model:
            queue.push(one)
            model[one.id] = one
        elif what == "remove":
            assert queue.remove(one.id) == model.pop(one.id, None)
        elif what == "give" and model:
            (first,) = ahead(queue, 1)
            queue.give_out(first, 0.0)
            del model[first.id]
        elif what == "charge":
            queue.shares.charge(one.lane, OUT_COST * tokens)
        assert ahead(queue) == by_the_book(model, queue) and len(queue) == len(model)
        assert queue.tokens == sum(other.tokens for other in model.values())


def test_what_is_served_before_one_that_comes() -> None:
    """1 its own lane and better classes  2 of another lane what brings it level  3 many lanes, as if all were alike."""
    queue = queue_of("fair", 10_000, 1_000_000)
    for arrival in range(8):
        queue.push(entry(arrival, 1, 100, policy="fair", tenant="flood"))
    queue.push(entry(8, 0, 30, policy="fair", tenant="better"))
    queue.push(entry(9, 2, 70, policy="fair", tenant="worse"))
    flood, light = (entry(10, 1, 0, policy="fair", tenant=tenant).lane for tenant in ("flood", "light"))
    assert queue.ahead_of(flood) == (9, 830)
    assert queue.ahead_of(light) == (1, 30), "who has had nothing is next of its class"
    queue.push(entry(11, 1, 200, policy="fair", tenant="light"))
    assert queue.ahead_of(light) == (1 + 1 + 2, 30 + 200 + 200)
    for arrival in range(12, 12 + 2 * LEVELLED):
        queue.push(entry(arrival, 1, 100, policy="fair", tenant=f"t{arrival}"))
    requests, tokens = queue.ahead_of(light)
    assert requests == pytest.approx(2 + 2 * LEVELLED + 8, rel=0.1)
    assert tokens == pytest.approx(100 * requests, rel=0.1)
    for request_id in [RequestId(f"r{arrival}") for arrival in range(200)]:
        queue.remove(request_id)
    assert queue.ahead_of(light) == (0, 0)


def test_ages_by_tier_and_how_far_tenants_are_apart() -> None:
    queue = queue_of()
    assert queue.ages_s(9.0) == {} and queue.service_gap() == 0.0
    queue.push(entry(1, since=1.0, tier="chat", tenant="a"))
    queue.push(entry(2, since=2.0, tier="chat", tenant="b"))
    queue.hold(entry(3, since=0.5, tier="batch"))
    assert queue.ages_s(3.0) == {"chat": 2.0, "batch": 2.5}
    queue.shares.charge(entry(1, tier="chat", tenant="a").lane, 70.0)
    assert queue.service_gap() == 70.0
    queue.push(entry(4, priority=1, tier="chat", tenant="c"))
    assert queue.service_gap() == 70.0, "another class is served before or after, not beside"
    queue.remove(RequestId("r1"))
    assert queue.service_gap() == 0.0, "who does not wait is owed nothing"
