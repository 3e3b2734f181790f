"""How long a reader of blocks rests: not for a prompt's last blocks, and often enough on a saturated link."""

from __future__ import annotations

import pytest

from transfer.inbox import BURST_S, REST_TURNS, TURN_S, Turns


class Reader:
    """Reads turns of `turn_s`, one after the other, in a time of its own."""

    def __init__(self, computing: bool = True) -> None:
        self.now = 100.0
        self._turns = Turns(lambda: computing, lambda: self.now)

    def read(self, turn_s: float) -> float:
        """Seconds that it then rests."""
        self.now += turn_s
        rest_s = self._turns.rest_s(turn_s)
        self.now += rest_s
        return rest_s


def test_what_a_prompt_ends_with_is_read_without_a_rest() -> None:
    """Sixteen blocks in two messages; that came, after a rest in their midst, 17 ms late to the hand-over."""
    reader = Reader()
    for _ in range(20):
        assert [reader.read(0.0011) for _ in range(2)] == [0, 0]
        reader.now += 0.05


@pytest.mark.parametrize("turn_s", [TURN_S, 1.5 * TURN_S, 3 * TURN_S])
def test_a_saturated_link_leaves_the_step_its_time(turn_s: float) -> None:
    reader, turns = Reader(), 2000
    for _ in range(turns):
        reader.read(turn_s)
    read_s = turns * turn_s
    assert read_s / (reader.now - 100.0) < 1.1 * turn_s / (turn_s + REST_TURNS * TURN_S)


def test_nothing_is_saved_up_beyond_a_burst() -> None:
    reader = Reader()
    reader.now += 3600
    read = 0
    while reader.read(TURN_S) == 0:
        read += 1
    assert read <= BURST_S / TURN_S + 1


def test_nobody_rests_while_no_step_wants_the_cores() -> None:
    reader = Reader(computing=False)
    assert {reader.read(TURN_S) for _ in range(100)} == {0}
