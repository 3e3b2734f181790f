"""`make chaos`: plays the matrix of phase × fault and prints what came of it. Fails where a cell is not as stated.

python -m tests.chaos.run ["part of a name, part of another"]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import track

from tests.chaos import real
from tests.chaos.cells import REAL
from tests.chaos.plan import SENSELESS, cells
from tests.chaos.tables import Entry, tables
from tests.chaos.virtual import run_cell

WIDTH = 170


def main(only: str) -> int:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    began_s = time.monotonic()
    entries = list(_virtual(console, wanted))
    if entries:
        console.print(tables("Virtual time, the pure objects", entries))
        console.print(f"{time.monotonic() - began_s:.0f} s")
        _say_senseless(console)
    real_entries = list(_real(console, wanted))
    if real_entries:
        console.print(tables("Real processes, the default model", real_entries))
    entries += real_entries
    if not entries:
        console.print(f"no cell is called so: {only}")
        return 2
    return 1 if any(entry.wrong for entry in entries) else 0


def is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(part in name for part in wanted)


def _virtual(console: Console, wanted: Sequence[str]) -> Iterator[Entry]:
    chosen = [cell for cell in cells() if is_wanted(cell.name, wanted)]
    for cell in track(chosen, "virtual time", console=console, transient=True):
        result = run_cell(cell)
        yield Entry(
            cell.name,
            str(cell.station),
            str(cell.fault),
            cell.victim,
            result.outcome,
            result.attempts > 1,
            "; ".join(result.wrong),
        )


def _real(console: Console, wanted: Sequence[str]) -> Iterator[Entry]:
    """A line for each, too: they take seconds, and say what a client saw of it."""
    names = [name for name in REAL if is_wanted(name, wanted)]
    for result in real.run(names) if names else ():
        console.print(real.row(result), markup=False, highlight=False)
        yield result.entry()


def _say_senseless(console: Console) -> None:
    console.print("Cells that make no sense:")
    reasons: dict[str, list[str]] = {}
    for (station, fault), why in SENSELESS.items():
        reasons.setdefault(f"{fault}: {why}", []).append(str(station))
    for reason, stations in reasons.items():
        console.print(f"  {reason} ({', '.join(stations)})")


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
