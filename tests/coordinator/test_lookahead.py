"""Prompts that wait, played forward by the rule by which they are given out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.lookahead import IN_TIME, Asked, Computer, Lookahead
from coordinator.step_costs import Beside, Chunks, left_of_chunk

CHUNKS = Chunks((0.0, 0.0, 0.0, 0.001), 100)
"""A thousand tokens a second, in steps of 100."""
BESIDE = Beside(step_tokens=100, row_step_s=0.0, token_s=0.001, rows=0)


def pool(*line: tuple[float, int]) -> Computer:
    return Computer(CHUNKS, list(line), own_tokens=200)


def beside(*line: tuple[float, int], gap_s: float = 0.02) -> Computer:
    return Computer(BESIDE, list(line), own_tokens=200, local_gap_s=gap_s)


def test_each_waits_for_room_and_for_those_before_it() -> None:
    ahead = Lookahead([pool((0.5, 300))], [], 0.05)
    assert [ahead.next(Asked(200))[0] for _ in range(3)] == pytest.approx([0.7, 0.9, 1.1])
    ahead.after(2.0)
    assert ahead.next(Asked(None))[0] == pytest.approx(2.2)


def test_of_two_pools_whoever_has_room_first_gets_it() -> None:
    ahead = Lookahead([pool((0.5, 300)), pool((0.1, 300))], [], 0.05)
    assert [ahead.next(Asked(200))[0] for _ in range(4)] == pytest.approx([0.3, 0.5, 0.7, 0.7])


def test_room_is_two_steps_and_much_longer_ones_take_none_of_it() -> None:
    one = pool((0.3, 300), (0.35, 50))
    assert one.room_s(200) == pytest.approx(0.3), (
        "the long one must be done, the short one may stand before it"
    )
    assert one.room_s(10) == 0.0, "it waits for neither"
    assert pool((0.05, 50)).room_s(200) == 0.0


def test_a_decode_worker_computes_what_it_has_sooner_by_a_tenth() -> None:
    """Twice while the pool is busy; then both could, and it is free first."""
    ahead = Lookahead([pool((0.5, 300))], [beside()], 0.05)
    told = [ahead.next(Asked(200)) for _ in range(4)]
    assert [local for _, local in told] == [True, True, True, False]
    assert [first_s for first_s, _ in told] == pytest.approx([0.2, 0.4, 0.6, 0.7])
    assert Lookahead([pool()], [beside(gap_s=0.05)], 0.05).next(Asked(200))[1] is False, (
        "near equal ways: the pool's"
    )
    assert Lookahead([pool()], [beside(gap_s=0.05)], 0.50).next(Asked(200))[1] is True, (
        "a hand-over takes long"
    )


def test_a_copy_goes_its_own_way() -> None:
    ahead = Lookahead([pool()], [beside((0.4, 300))], 0.0)
    other = ahead.copy()
    for _ in range(5):
        other.next(Asked(200))
    assert ahead.next(Asked(200))[0] == pytest.approx(0.2)


def test_short_prompts_share_steps_and_rows_are_waited_for() -> None:
    costly = Chunks((0.1, 0.0, 0.0, 0.001), 100)
    assert costly.alone_s(50) == pytest.approx(0.15)
    assert costly.taken_s(50) == pytest.approx(0.10), "half of a step"
    assert costly.first_s(50, behind=True) == pytest.approx(0.20), "and it ends somewhere in one"
    assert costly.taken_s(150) == costly.alone_s(150) == pytest.approx(0.35), (
        "a long one has its last to itself"
    )
    batch = Beside(step_tokens=100, row_step_s=0.04, token_s=0.001, rows=3)
    assert batch.alone_s(150) == pytest.approx(0.23)
    assert batch.first_s(150, behind=False) == pytest.approx(0.25), "half of the step that runs"
    assert batch.first_s(150, behind=True) == pytest.approx(0.26), "one that has just begun, mostly"
    joined = Beside(step_tokens=100, row_step_s=0.04, token_s=0.001, rows=3, on_average=True)
    assert joined.alone_s(150) == pytest.approx(0.15 + 2 * 0.04) and joined.alone_s(50) == pytest.approx(0.09)


def test_chunks_are_shorter_where_others_join() -> None:
    assert left_of_chunk(0.0) == 1.0
    assert left_of_chunk(0.01) == pytest.approx(0.995, abs=1e-4), "half of one step in a hundred"
    assert left_of_chunk(1000.0) == pytest.approx(0.001), "somebody has waited for all of it"


def test_who_is_to_go_one_way_goes_it_unless_the_other_is_a_good_deal_sooner() -> None:
    def local(gap_s: float, plan: bool | None) -> bool:
        return Lookahead([pool()], [beside(gap_s=0.05)], gap_s).next(Asked(200, plan=plan))[1]

    assert [local(0.05, plan) for plan in (None, True, False)] == [False, True, False]
    assert [local(0.10, plan) for plan in (None, True, False)] == [True, True, False]
    assert [local(0.50, plan) for plan in (None, True, False)] == [True, True, True]
    assert Lookahead([pool()], [beside(gap_s=0.3)], 0.05).next(Asked(200, plan=True))[1] is False


def test_a_batch_waits_for_one_that_needs_it_and_else_for_no_more_than_is_gained() -> None:
    """By way of the pool 0.7 s and 0.05, beside the batch 0.22: 0.53 gained, and 0.2 lost by each row."""

    def local(asked: Asked, rows: int) -> bool:
        one = Computer(replace(BESIDE, rows=rows), [], own_tokens=200, local_gap_s=0.02)
        return Lookahead([pool((0.5, 300))], [one], 0.05).next(asked)[1]

    assert [local(Asked(200), rows) for rows in (2, 3)] == [True, False]
    assert local(Asked(200, waiting=1), 3), "one that waits is sooner served too"
    assert not local(Asked(200, left_s=0.71 / IN_TIME), 3), "in time by way of the pool"
    assert local(Asked(200, left_s=0.69 / IN_TIME), 3)
    assert local(Asked(200, left_s=9.0, plan=True), 3), "its place behind others was reckoned so"
    assert not local(Asked(200, left_s=9.0, plan=False), 3)
