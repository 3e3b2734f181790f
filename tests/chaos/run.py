"""`make chaos`: plays the matrix of phase × fault and prints what came of it. Fails where a cell is not as stated.

python -m tests.chaos.run ["part of a name, part of another" [virtual | real]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import track

from tests.chaos import real
from tests.chaos.cells import REAL
from tests.chaos.plan import SENSELESS, cells
from tests.chaos.tables import Entry, tables
from tests.chaos.virtual import run_cell

WIDTH = 170


def main(only: str = "", world: str = "") -> int:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    parts = [part.strip() for part in only.split(",") if part.strip()]
    if world not in ("", "virtual", "real"):
        console.print(f"{world} is neither virtual nor real")
        return 2

    def chosen(name: str) -> bool:
        return not parts or any(part in name for part in parts)

    entries: list[Entry] = []
    if world != "real":
        entries += _play_virtual(console, [cell.name for cell in cells() if chosen(cell.name)])
    if world != "virtual":
        entries += _play_real(console, [name for name in REAL if chosen(name)])
    if not entries:
        console.print(f"no cell is called so: {only}")
        return 2
    return 1 if any(entry.wrong for entry in entries) else 0


def _play_virtual(console: Console, names: list[str]) -> list[Entry]:
    began_s = time.monotonic()
    entries = list(_virtual(console, names))
    if entries:
        console.print(tables("In virtual time: the pure objects", entries))
        console.print(f"{time.monotonic() - began_s:.0f} s\n")
        _say_senseless(console)
    return entries


def _virtual(console: Console, names: list[str]) -> Iterator[Entry]:
    wanted = [cell for cell in cells() if cell.name in names]
    for cell in track(wanted, "virtual time", console=console, transient=True):
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


def _say_senseless(console: Console) -> None:
    console.print("Cells that make no sense:")
    reasons: dict[str, list[str]] = {}
    for (station, fault), why in SENSELESS.items():
        reasons.setdefault(f"{fault}: {why}", []).append(str(station))
    for reason, stations in reasons.items():
        console.print(f"  {reason} ({', '.join(stations)})")


def _play_real(console: Console, names: list[str]) -> list[Entry]:
    """Each is told of as it ends: all of them take minutes."""
    if not names:
        return []
    began_s = time.monotonic()
    entries = []
    console.print("\nOver real processes:")
    for result in real.run(names):
        print(real.row(result), flush=True)
        entries.append(result.entry())
    console.print(tables("Over real processes", entries))
    console.print(f"{time.monotonic() - began_s:.0f} s")
    return entries


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
