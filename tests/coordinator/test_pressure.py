"""What better classes are guessed to take: those that keep coming, and those that came all at once."""

from __future__ import annotations

import pytest

from coordinator.pressure import BUCKET_S, LATELY_S, MEMORY_S, MOST_CLASSES, Pressure


def stream(*, every_s: float = 0.5, seconds: float = 0.25, until_s: float = 100.0) -> Pressure:
    pressure = Pressure()
    for number in range(round(until_s / every_s)):
        pressure.came(1, seconds, number * every_s)
    return pressure


def burst(prompts: int = 21, seconds: float = 0.4) -> Pressure:
    """At 0 s; all but the first are counted: 8 s."""
    pressure = Pressure()
    for _ in range(prompts):
        pressure.came(1, seconds, 0.0)
    return pressure


@pytest.mark.parametrize("first_s", [0.2, 1.0, 2.5, 10.0, 25.0])
def test_a_stream_that_takes_half_of_the_time_makes_everything_take_twice_as_long(first_s: float) -> None:
    coming = stream().above(2, 100.0)
    assert coming.done_s(first_s) == pytest.approx(2 * first_s, rel=0.15)
    assert coming.takes_s(2 * first_s) == pytest.approx(first_s, rel=0.15)
    assert stream().above(1, 100.0).done_s(first_s) == first_s, "to its own class it is no better one"


def test_a_stream_that_takes_all_time_lets_nobody_through_for_as_long_as_it_lasted() -> None:
    assert stream(seconds=0.5).above(2, 100.0).done_s(1.0) > 0.9 * MEMORY_S
    assert stream(seconds=0.5, until_s=9.0).above(2, 9.0).done_s(1.0) == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("ago_s", [0.01, 0.5, 1.0, 3.0])
def test_a_burst_is_guessed_to_come_once_more_and_not_for_ever(ago_s: float) -> None:
    """The first second of one was taken for a steady rate, up to ten times what was there."""
    coming = burst().above(2, ago_s)
    assert coming.done_s(6.0) == pytest.approx(14.0)
    assert coming.takes_s(20.0) == pytest.approx(8.0)


def test_a_burst_that_was_long_ago_is_over_for_what_is_done_sooner() -> None:
    assert burst().above(2, LATELY_S + 10.0).done_s(6.0) == 6.0
    assert burst().above(2, LATELY_S + 10.0).done_s(17.0) == pytest.approx(25.0)
    assert burst().above(2, MEMORY_S + 1.0).done_s(100.0) == 100.0


def test_one_alone_says_not_how_often_such_come() -> None:
    assert burst(1).above(2, 0.5).done_s(1.0) == 1.0


def test_what_is_too_late_now_fits_when_it_is_said_to_and_no_sooner() -> None:
    """Meanwhile what is ahead gets less, and of better classes nobody comes."""
    for pressure, now, first_s, within_s in (
        (burst(), 1.0, 6.0, 10.0),
        (burst(), 1.0, 14.0, 10.0),
        (stream(), 100.0, 3.0, 4.0),
        (stream(seconds=0.45), 100.0, 0.6, 2.0),
        (stream(), 100.0, 20.0, 30.0),
    ):
        assert pressure.above(2, now).done_s(first_s) > within_s
        wait_s = pressure.above(2, now).fits_after_s(first_s, 0.5, within_s)
        assert 0 < wait_s <= pressure.above(2, now).done_s(first_s) - within_s + 1e-6
        later = pressure.above(2, now + wait_s + 0.01)
        assert later.done_s(max(0.5, first_s - wait_s - 0.01)) <= within_s
        sooner = pressure.above(2, now + wait_s - 0.1)
        assert sooner.done_s(max(0.5, first_s - wait_s + 0.1)) > within_s


def test_what_is_known_of_classes_is_bounded() -> None:
    pressure = Pressure()
    for number in range(3 * MOST_CLASSES):
        for at in range(200):
            pressure.came(number, 0.1, 0.01 * at)
    assert len(pressure.above(10_000, 2.0).ages_s) <= MOST_CLASSES * (2 + 2.0 / BUCKET_S)
