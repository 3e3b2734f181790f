"""Plays cells of the plan over real processes, one after another on one set of them.

python -m tests.chaos.real ["name of a cell" …]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from common.counters import split_label
from kernels.default_model import ensure_default_model, terminal_progress
from tests.chaos.cells import OVER_SHM, REAL, play
from tests.chaos.plan import Cell
from tests.chaos.proxy import COORDINATOR
from tests.chaos.scene import Oracle, Scene, Witness
from tests.chaos.service import HandStarted
from tests.chaos.stations import SHAPES, NotReached
from tests.chaos.stream import Answer, Stream
from tests.chaos.tables import Entry

LICENSE = Path(__file__).parents[2] / "LICENSE"
TRIES = 4


@dataclass(frozen=True, slots=True)
class Result:
    """`outcome` in the words of the plan. `again`: it took another attempt. `settled_s`: until every block, slot,
    socket and gauge was back at the survivors. `wrong` is empty where all is as stated."""

    cell: Cell
    transfer: str = "tcp"
    outcome: str = ""
    again: bool = False
    pause_s: float = 0.0  # the longest that its client saw
    settled_s: float = 0.0
    seconds: float = 0.0
    note: str = ""
    wrong: str = ""

    def entry(self) -> Entry:
        """In the table, "shm" where blocks did not travel by tcp."""
        victim = f"{self.cell.victim} shm".strip() if self.transfer == "shm" else self.cell.victim
        station, fault = str(self.cell.station), str(self.cell.fault)
        return Entry(self.cell.name, station, fault, victim, self.outcome, self.again, self.wrong)


class RealCells:
    """What many cells share: the processes, and what an undisturbed answer is."""

    def __init__(self, service: HandStarted, text_ids: list[int]) -> None:
        self._service = service
        self._oracle = Oracle(service, text_ids)

    def play(self, cell: Cell) -> Result:
        """Raises AssertionError where anything is not as stated. Tries again where a phase was over too soon."""
        for _ in range(TRIES - 1):
            try:
                return self._once(cell)
            except NotReached:
                continue
        return self._once(cell)

    def _once(self, cell: Cell) -> Result:
        self._service.until_ready()
        expected = self._oracle.answer(SHAPES[cell.station])
        started = time.monotonic()
        before = {name: self._count(name) for name in cell.counts}
        scene = Scene(self._service, self._oracle, SHAPES[cell.station])
        witness = Witness(self._oracle, breaks=cell.victim == "C")
        try:
            play(cell, scene)
            outcome = _outcome(scene.stream, expected)
        finally:
            witness.stop()
            scene.undo()
        witness.end()
        settled_s = scene.settle()
        assert outcome in cell.outcomes, f"{outcome} instead of {' or '.join(cell.outcomes)}"
        again = self._attempts(scene) > 1
        assert cell.migrates in (None, again), (
            "it took another attempt" if again else "it was not tried again"
        )
        self._check_counted(before)
        assert (faults := self._service.faults()) == [], faults
        seconds = time.monotonic() - started
        return Result(
            cell,
            outcome=outcome,
            again=again,
            pause_s=scene.stream.longest_gap_s,
            settled_s=settled_s,
            seconds=seconds,
            note=scene.note,
        )

    def _attempts(self, scene: Scene) -> int:
        """Of a request that the present coordinator knows and gave out."""
        request_id = self._service.proxy.id_of(scene.salt)
        if not request_id or COORDINATOR in scene.killed:
            return 0
        return int(self._service.get(f"/admin/requests/{request_id}")["attempts"])

    def _check_counted(self, before: dict[str, float]) -> None:
        """Counters of workers come with heartbeats."""
        deadline = time.monotonic() + 2.0
        while same := [name for name, count in before.items() if self._count(name) <= count]:
            assert time.monotonic() < deadline, f"not counted: {same}"
            time.sleep(0.05)

    def _count(self, counter: str) -> float:
        name, labels = split_label(counter)
        return self._service.metric(name, **labels)


def _outcome(stream: Stream, expected: Answer) -> str:
    """In the words of the plan; raises where a text is wrong."""
    answer = stream.answer()
    if not answer.error:
        assert answer == expected, f"{answer} instead of {expected}"
        return "exact"
    assert expected.text.startswith(answer.text), f"{answer} is no beginning of {expected}"
    if answer.error.startswith("hung up"):
        return "left" if stream.left else "broken"
    return f"error:{answer.error}"


def text_ids_of(model: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids)


def run(names: Iterable[str] = ()) -> Iterator[Result]:
    """Plays the cells of these names, or all; one that fails does not keep the others from being played."""
    wanted = list(names) or [*REAL, *OVER_SHM]
    with terminal_progress() as progress:
        text_ids = text_ids_of(ensure_default_model(progress))
    for transfer, cells in (("tcp", REAL), ("shm", OVER_SHM)):
        chosen = [REAL[name] for name in cells if name in wanted]
        if chosen:
            yield from _on_one_service(transfer, chosen, text_ids)


def _on_one_service(transfer: str, cells: list[Cell], text_ids: list[int]) -> Iterator[Result]:
    with HandStarted(Path(tempfile.mkdtemp(prefix="chaos-")), transfer) as service:
        real = RealCells(service, text_ids)
        for cell in cells:
            try:
                yield replace(real.play(cell), transfer=transfer)
            except Exception as error:
                yield Result(cell, transfer, wrong=f"{type(error).__name__}: {error}")


def row(result: Result) -> str:
    times = f"{result.seconds:5.1f} s, pause {result.pause_s:4.1f} s, idle after {result.settled_s:4.2f} s"
    outcome = f"{result.outcome}{' ↻' if result.again else ''}" if not result.wrong else f"✗ {result.wrong}"
    return f"{result.transfer} {result.cell.name:<46} {times}  {outcome}  {result.note}"


def main(names: list[str]) -> int:
    wrong = 0
    for result in run(names):
        print(row(result), flush=True)
        wrong += bool(result.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
