"""The tables of `make chaos`: phases down, faults across, in each cell who was hit and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

COLUMNS = 5  # of faults side by side, so that it is readable where lines hold 160 characters


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell that was played. `wrong` says what was not as stated, and is empty where all was."""

    name: str
    phase: str
    fault: str
    victim: str
    outcome: str
    again: bool
    wrong: str


def tables(title: str, entries: Sequence[Entry]) -> Group:
    """One below the other, each with some of the faults."""
    faults = list(dict.fromkeys(entry.fault for entry in entries))
    parts = [faults[at : at + COLUMNS] for at in range(0, len(faults), COLUMNS)]
    return Group(
        *(_table(title if not at else None, entries, part) for at, part in enumerate(parts)), _sum(entries)
    )


def _table(title: str | None, entries: Sequence[Entry], faults: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True, min_width=100)
    table.add_column("phase", no_wrap=True)
    for fault in faults:
        table.add_column(fault)
    for phase in dict.fromkeys(entry.phase for entry in entries):
        here = [[e for e in entries if e.phase == phase and e.fault == fault] for fault in faults]
        if any(here):
            table.add_row(phase, *(_cell(some) for some in here))
    return table


def _cell(entries: Iterable[Entry]) -> Text:
    """A line for each outcome: a mark, the outcome, whom the fault hit; ↻ where it took another attempt."""
    lines: dict[tuple[bool, str], list[str]] = {}
    for entry in entries:
        victim = entry.victim.replace(" of ", "·") + ("↻" if entry.again else "")
        lines.setdefault((bool(entry.wrong), entry.outcome), []).append(victim)
    text = Text()
    for (wrong, outcome), victims in lines.items():
        text.append("\n" if text else "")
        text.append("✗ " if wrong else "✓ ", style="bold red" if wrong else "green")
        text.append(f"{outcome} ", style="red" if wrong else "")
        text.append(", ".join(victims), style="dim")
    return text if text else Text("–", style="dim")


def _sum(entries: Sequence[Entry]) -> str:
    bad = [entry for entry in entries if entry.wrong]
    lines = [f"[red]✗[/] {escape(entry.name)}: {escape(entry.wrong)}" for entry in bad]
    lines.append(f"{len(entries) - len(bad)} of {len(entries)} cells as stated; ↻: it took another attempt\n")
    return "\n".join(lines)
