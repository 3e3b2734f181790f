"""Eight cells of the plan of phase × fault over real processes (`make chaos` plays more): one or two of every kind of
fault, in phases that differ, on one set of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.cells import REAL
from tests.chaos.real import RealCells, row
from tests.chaos.service import HandStarted

CELLS = (
    "sending / client leaves, Aborts lost",
    "sending / block corrupted P-D, every block",
    "sending / message lost Handover of P",
    "ended / message lost Tokens of D",
    "sending / link cut P-D",
    "middle chunk / SIGKILL P",
    "delivered / SIGKILL D",
    "decoding / stops answering D",
)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, text_ids: list[int]) -> Iterator[RealCells]:
    with HandStarted(tmp_path_factory.mktemp("chaos")) as service:
        yield RealCells(service, text_ids)


@pytest.mark.parametrize("name", CELLS)
def test_a_fault_has_its_stated_outcome(name: str, cells: RealCells) -> None:
    print(row(cells.play(REAL[name])))


def test_every_phase_and_every_fault_is_played_at_least_twice() -> None:
    """By `make chaos`; a message that is doubled, late or lost counts as a fault of its own."""
    stations = [cell.station for cell in REAL.values()]
    faults = [cell.fault for cell in REAL.values()]
    assert len(REAL) >= 25
    assert {name: stations.count(name) for name in set(stations) if stations.count(name) < 2} == {}
    assert {name: faults.count(name) for name in set(faults) if faults.count(name) < 2} == {}
