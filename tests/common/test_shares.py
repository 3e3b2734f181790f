"""Virtual token counters: lifting, forgetting, and the bound that they are there for."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from common.ordering import Lane
from common.shares import Shares


def lane(name: str, number: int = 0) -> Lane:
    return (number, "", name)


def test_lifted_to_the_least_that_waits_or_to_who_left_last() -> None:
    shares = Shares()
    shares.comes(lane("a"), None)
    shares.charge(lane("a"), 50.0)
    shares.comes(lane("b"), 50.0)
    assert shares.counter(lane("b")) == 50.0
    shares.charge(lane("b"), 30.0)
    shares.goes(lane("b"))
    shares.comes(lane("b"), 60.0)
    assert shares.counter(lane("b")) == 80.0, "never lowered"
    for name in ("a", "b"):
        shares.goes(lane(name))
    shares.comes(lane("c"), None)
    assert shares.counter(lane("c")) == 80.0, "what the last one had"
    shares.comes(lane("d", 1), None)
    assert shares.counter(lane("d", 1)) == 0.0, "another class is another matter"


def test_the_table_is_bounded_and_only_idle_ones_are_forgotten() -> None:
    shares = Shares(max_idle=10)
    shares.comes(lane("stays"), None)
    shares.charge(lane("stays"), 7.0)
    for number in range(100):
        shares.comes(lane(f"t{number}", number), None)
        shares.charge(lane(f"t{number}", number), 5.0)
        shares.goes(lane(f"t{number}", number))
    assert len(shares) == 11
    assert shares.counter(lane("t99", 99)) == 5.0 and shares.counter(lane("t0", 0)) == 0.0
    shares.charge(lane("t0", 0), 9.0)
    assert shares.counter(lane("t0", 0)) == 0.0 and len(shares) == 11, (
        "who is forgotten is not brought back by it"
    )
    assert shares.counter(lane("stays")) == 7.0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), min_size=1, max_size=300),
    st.tuples(*[st.sampled_from([1.0, 2.0, 5.0])] * 3),
)
@settings(max_examples=60, deadline=None)
def test_who_waits_all_the_time_is_never_further_apart_than_one_request(
    asks: list[tuple[int, int]], weights: tuple[float, float, float]
) -> None:
    """Each choice of who is least, charged with any size: counters differ by at most U, service by at most 2 U."""
    shares = Shares()
    names = [lane(str(number)) for number in range(3)]
    for one in names:
        shares.comes(one, None)
    largest = 100 / min(weights)
    for _, size in asks:
        least = min(names, key=shares.counter)
        shares.charge(least, size / weights[names.index(least)])
        counters = [shares.counter(one) for one in names]
        assert max(counters) - min(counters) <= largest
