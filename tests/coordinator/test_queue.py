"""The queue: order, bounds, and a count of tokens that adds up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from common.request import RequestId
from coordinator.queue import Entry, WaitingQueue


def entry(arrival: int, priority: int = 0, tokens: int = 10, since: float = 0.0) -> Entry:
    return Entry(RequestId(f"r{arrival}"), priority, arrival, tokens, since)


ROOM = 10_000


def order(queue: WaitingQueue) -> list[int]:
    return [e.arrival for e in queue.ahead(100, ROOM)]


def test_class_then_arrival() -> None:
    queue = WaitingQueue(max_requests=10, max_tokens=1000)
    for arrival, priority in ((1, 1), (2, 0), (3, -1), (4, 0)):
        queue.push(entry(arrival, priority))
    assert order(queue) == [3, 2, 4, 1]
    assert queue.ahead(2, ROOM) == [entry(3, -1), entry(2, 0)]


def test_who_fits_nobody_that_is_left_is_in_nobodys_way() -> None:
    queue = WaitingQueue(max_requests=10, max_tokens=1000)
    for arrival in range(1, 6):
        queue.push(replace(entry(arrival), longest=100 if arrival < 4 else 20))
    assert [e.arrival for e in queue.ahead(2, 20)] == [4, 5]
    assert [e.arrival for e in queue.ahead(2, 100)] == [1, 2]


def test_who_comes_back_stands_where_it_stood() -> None:
    queue = WaitingQueue(max_requests=10, max_tokens=1000)
    for arrival in (1, 2, 3):
        queue.push(entry(arrival))
    assert queue.remove(RequestId("r1")) is not None
    queue.push(entry(4))
    queue.push(entry(1))
    assert order(queue) == [1, 2, 3, 4]


def test_bounds() -> None:
    queue = WaitingQueue(max_requests=2, max_tokens=100)
    assert queue.full_for(1, 5000) is None, "one request always can"
    queue.push(entry(1, tokens=60))
    assert queue.full_for(1, 40) is None
    reason = queue.full_for(1, 41)
    assert reason is not None and "60 prompt tokens" in reason
    queue.push(entry(2, tokens=1))
    reason = queue.full_for(1, 1)
    assert reason is not None and "the limit is 2" in reason


def test_age_is_of_who_waits_longest() -> None:
    queue = WaitingQueue(max_requests=10, max_tokens=100)
    assert queue.age_s(5.0) == 0.0
    queue.push(entry(1, since=2.0))
    queue.push(entry(2, priority=-1, since=4.0))
    assert queue.age_s(5.0) == 3.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(-2, 2), st.integers(1, 50))))
@settings(max_examples=100, deadline=None)
def test_against_a_list(steps: list[tuple[bool, int, int, int]]) -> None:
    queue = WaitingQueue(max_requests=100, max_tokens=10_000)
    model: dict[RequestId, Entry] = {}
    for push, arrival, priority, tokens in steps:
        one = entry(arrival, priority, tokens)
        if push and one.id not in model:
            queue.push(one)
            model[one.id] = one
        elif not push:
            assert queue.remove(one.id) == model.pop(one.id, None)
        expected = sorted(model.values(), key=lambda e: e.order)
        assert queue.ahead(100, ROOM) == expected and len(queue) == len(model)
        assert queue.first() == (expected[0] if expected else None)
        assert queue.tokens == sum(e.tokens for e in expected)
