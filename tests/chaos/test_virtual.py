"""The whole matrix of phase × fault in virtual time: each cell ends as it is stated, and nothing is left anywhere."""

from __future__ import annotations

import pytest

from tests.chaos.plan import SENSELESS, STATIONS, Cell, Fault, cells
from tests.chaos.virtual import run_cell


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    result = run_cell(cell)
    assert not result.wrong, "\n".join(result.wrong)


def test_every_phase_meets_every_fault_or_it_is_said_why_not() -> None:
    met = {(cell.station, cell.fault) for cell in cells()}
    assert met.isdisjoint(SENSELESS)
    assert met | set(SENSELESS) == {(station, fault) for station in STATIONS for fault in Fault}


def test_a_cell_is_a_function_of_its_seed() -> None:
    cell = next(cell for cell in cells() if cell.name == "decoding / SIGKILL D")
    first, same, other = (run_cell(cell, seed) for seed in (1, 1, 2))
    assert first == same and first.ended_at == same.ended_at != other.ended_at
