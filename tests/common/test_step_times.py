"""The fit of step times: it finds what made them, follows change, and never says that more work takes less time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from common.step_times import ENOUGH, MEMORY, REFIT, StepShape, StepTimes, chunk_for, seconds_of

MADE_BY = (8e-3, 4e-4, 1.5e-6, 9e-5)


def shape(random_: random.Random) -> StepShape:
    rows = random_.randint(1, 16)
    return StepShape(rows, rows * random_.randint(1, 600), random_.choice((0, 0, 64, 128, 256)))


def fed(steps: int, made_by: tuple[float, float, float, float] = MADE_BY, noise: float = 0.1) -> StepTimes:
    times, random_ = StepTimes(), random.Random(1)
    for _ in range(steps):
        one = shape(random_)
        times.observe(one, seconds_of(made_by, one) * random_.uniform(1 - noise, 1 + noise))
    return times


def test_it_says_nothing_before_it_knows_enough() -> None:
    times = fed(ENOUGH - 1)
    assert times.coefficients is None and times.seconds(StepShape(1, 1, 1)) == 0.0
    assert fed(ENOUGH).coefficients is not None


def test_it_finds_what_made_the_times() -> None:
    times, random_ = fed(300), random.Random(2)
    for _ in range(50):
        one = shape(random_)
        assert times.seconds(one) == pytest.approx(seconds_of(MADE_BY, one), rel=0.1)


def test_a_machine_that_slows_down_is_followed() -> None:
    times, random_ = fed(300), random.Random(3)
    slower = (16e-3, 8e-4, 3e-6, 18e-5)
    for _ in range(2 * MEMORY):
        one = shape(random_)
        times.observe(one, seconds_of(slower, one))
    for _ in range(50):
        one = shape(random_)
        assert times.seconds(one) == pytest.approx(seconds_of(slower, one), rel=0.2)


def test_one_stall_does_not_spoil_it() -> None:
    times, one = fed(300), StepShape(8, 2000, 0)
    before = times.seconds(one)
    times.observe(one, 30.0)
    assert times.seconds(one) < 1.2 * before


def test_whoever_asks_in_every_step_hears_of_all_but_the_newest() -> None:
    times = fed(300)
    lately = times.lately
    assert lately is not None
    slower = (16e-3, 8e-4, 3e-6, 18e-5)
    for steps in range(REFIT):
        assert steps == 0 or times.lately == lately or steps >= REFIT - 300 % REFIT
        times.observe(StepShape(8, 2000, 0), seconds_of(slower, StepShape(8, 2000, 0)))
    assert times.lately != lately
    assert times.coefficients == times.lately, "the newest, to whoever asks for it"


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 40_000), st.integers(0, 512), st.floats(1e-5, 2.0)),
        min_size=ENOUGH,
        max_size=60,
    )
)
def test_more_work_never_takes_less(steps: list[tuple[int, int, int, float]]) -> None:
    times = StepTimes()
    for rows, context, chunk, seconds in steps:
        times.observe(StepShape(rows, context, chunk), seconds)
    fitted = times.coefficients
    assert fitted is not None and all(0 <= value < 1e9 for value in fitted)


def test_the_chunk_that_fits_ends_in_time_and_one_more_token_does_not() -> None:
    one = StepShape(8, 2000, 0)
    fits = chunk_for(MADE_BY, one, 0.040)
    assert fits is not None and fits > 0
    assert seconds_of(MADE_BY, StepShape(8, 2000, fits)) <= 0.040
    assert seconds_of(MADE_BY, StepShape(8, 2000, fits + 1)) > 0.040
    assert chunk_for(MADE_BY, one, 0.001) == 0
    assert chunk_for((1e-3, 0.0, 0.0, 0.0), one, 0.040) is None
