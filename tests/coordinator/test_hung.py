"""Who of our children is taken to hang: never one that is heard from, loads, or was looked at by nobody."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.hung import Hung, HungOnes


def row(pid: int = 1, state: str = "ready", **fields: Any) -> dict[str, Any]:
    return {"id": "d0", "pid": pid, "state": state, "becomes": None, "overdue": False, **fields}


LOST = row(state="lost")


def looked(ones: HungOnes, rows: list[dict[str, Any]], first_s: int, last_s: int) -> list[float]:
    """Once every two seconds; when somebody was said to hang."""
    return [now for now in range(first_s, last_s + 1, 2) if ones.look(rows, [1], now)]


@pytest.mark.parametrize(
    "silent",
    [[LOST], [row(state="lost", left=True)], [row(state="starting", becomes="decode")], []],
    ids=["lost", "said that it leaves", "was to come back", "unknown to a coordinator that was restarted"],
)
def test_who_lives_and_is_silent_for_too_long_hangs(silent: list[dict[str, Any]]) -> None:
    ones = HungOnes(silent_s=10.0, unwatched_s=6.0)
    assert looked(ones, [row()], 0, 98) == []
    assert looked(ones, silent, 100, 114) == [112, 114], "again and again, until it is gone"
    assert ones.look(silent, [2], 116) == [], "that life is over"


def test_who_was_to_leave_and_is_overdue_hangs_at_once() -> None:
    ones = HungOnes(silent_s=10.0, unwatched_s=6.0)
    assert ones.look([row(overdue=True, becomes="prefill")], [1], 0.0) == [Hung("d0", 1, True)]


def test_who_was_heard_from_in_between_does_not() -> None:
    ones = HungOnes(silent_s=10.0, unwatched_s=6.0)
    for began in range(0, 80, 10):
        assert looked(ones, [LOST], began, began + 6) == []
        assert looked(ones, [row()], began + 8, began + 8) == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Its heartbeats of that time may lie unread beside the question."""
    ones = HungOnes(silent_s=10.0, unwatched_s=6.0)
    assert looked(ones, [LOST], 100, 104) == []
    assert looked(ones, [LOST], 200, 210) == []


def test_who_loads_and_who_is_not_ours_are_left_alone() -> None:
    ones = HungOnes(silent_s=10.0, unwatched_s=6.0)
    assert looked(ones, [], 0, 200) == [], "it never registered"
    assert looked(ones, [row(pid=7, state="lost")], 202, 400) == [], "another process's row"
