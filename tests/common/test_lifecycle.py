"""The two tables: what may follow what, and that nothing else may."""

from __future__ import annotations

import itertools
from typing import TypeVar

import pytest

from common.errors import IllegalMove
from common.lifecycle import (
    REQUEST_MOVES,
    TRANSFER_MOVES,
    Life,
    Phase,
    TransferLife,
    TransferPhase,
    is_end,
    tables_as_markdown,
    way,
)


def test_tables_name_every_phase() -> None:
    assert set(REQUEST_MOVES) == set(Phase)
    assert set(TRANSFER_MOVES) == set(TransferPhase)


@pytest.mark.parametrize("start, to", list(itertools.product(Phase, Phase)))
def test_a_request_moves_by_the_table_or_not_at_all(start: Phase, to: Phase) -> None:
    life = Life(start, 1.0)
    if to in REQUEST_MOVES[start]:
        life.move(to, 3.0)
        assert life.phase is to
        assert life.seconds_in(start, 9.0) == (2.0 if start is not to else 8.0)
    else:
        before = life.durations_s(3.0)
        with pytest.raises(IllegalMove):
            life.move(to, 3.0)
        assert (life.phase, life.durations_s(3.0)) == (start, before)


@pytest.mark.parametrize("start, to", list(itertools.product(TransferPhase, TransferPhase)))
def test_a_transfer_moves_by_the_table_or_not_at_all(start: TransferPhase, to: TransferPhase) -> None:
    life = TransferLife(start)
    if to in TRANSFER_MOVES[start]:
        life.move(to)
        assert life.phase is to
    else:
        with pytest.raises(IllegalMove):
            life.move(to)
        assert life.phase is start


P = TypeVar("P")


def _reachable(table: dict[P, frozenset[P]], start: P) -> set[P]:
    seen, todo = {start}, [start]
    while todo:
        for phase in table[todo.pop()] - seen:
            seen.add(phase)
            todo.append(phase)
    return seen


def test_every_phase_is_reached_and_every_live_phase_can_end() -> None:
    assert _reachable(REQUEST_MOVES, Phase.WAITING) == set(Phase)
    assert _reachable(TRANSFER_MOVES, TransferPhase.OFFERED) == set(TransferPhase)
    for phase, moves in REQUEST_MOVES.items():
        assert is_end(phase) == (not moves)
        if not is_end(phase):
            assert {Phase.FINISHED, Phase.ABORTED, Phase.FAILED} <= moves


def test_durations_add_up_over_visits_and_never_go_back() -> None:
    life = Life(Phase.QUEUED, 0.0)
    life.move(Phase.PREFILLING, 1.0)
    life.move(Phase.DECODING, 3.0)
    life.move(Phase.PREEMPTED, 4.0)
    life.move(Phase.PREFILLING, 6.0)
    life.move(Phase.DECODING, 5.0)  # a clock that steps back gives no negative time
    assert life.durations_s(9.0) == {
        "queued": 1.0,
        "prefilling": 2.0,
        "decoding": 5.0,
        "preempted": 2.0,
    }
    life.move(Phase.FINISHED, 9.0)
    assert "finished" not in life.durations_s(99.0)


def test_tables_print() -> None:
    text = tables_as_markdown()
    assert "| waiting | queued, finished, aborted, failed |" in text
    assert "| delivered | – |" in text


def test_the_way_to_every_phase_is_by_the_table() -> None:
    for start in Phase:
        for to in Phase:
            steps = way(start, to)
            assert all(step in REQUEST_MOVES[before] for before, step in itertools.pairwise((start, *steps)))
            assert not steps or (steps[-1] is to and Phase.WAITING not in steps)
    assert way(Phase.DECODING, Phase.DECODE_READY) == (Phase.PREEMPTED, Phase.DECODE_READY)
    assert way(Phase.QUEUED, Phase.DECODING) == (Phase.PREFILLING, Phase.DECODING)
    assert way(Phase.DECODING, Phase.QUEUED) == way(Phase.FINISHED, Phase.QUEUED) == ()
    life = Life(Phase.QUEUED, 1.0)
    life.go(Phase.DECODING, 3.0)
    assert life.durations_s(7.0) == {"queued": 2.0, "prefilling": 0.0, "decoding": 4.0}
