from __future__ import annotations

from coordinator.backoff import Backoff


def test_waits_double_up_to_the_limit() -> None:
    backoff = Backoff(first_s=0.5, limit_s=5, healthy_after_s=60)
    assert [backoff.after_death(1) for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]


def test_stays_bounded_over_any_number_of_deaths() -> None:
    backoff = Backoff(first_s=0.5, limit_s=30)
    assert [backoff.after_death(0) for _ in range(5000)][-1] == 30


def test_a_healthy_life_makes_the_next_wait_short_again() -> None:
    backoff = Backoff(first_s=0.5, limit_s=30, healthy_after_s=60)
    for _ in range(5):
        backoff.after_death(1)
    assert backoff.after_death(59.9) == 16
    assert backoff.after_death(60) == 0.5
    assert backoff.after_death(1) == 1
