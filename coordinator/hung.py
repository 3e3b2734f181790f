"""Which of the processes that `kvferry serve` started hang, by what the coordinator says of them. Pure.

told to leave, and overdue                                    at once
lost, or without a row where it had one (the coordinator      once that has been so, whenever somebody looked,
was started again, and it did not come back), but alive       for longer than a step may take
never registered: it may be loading                           never
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GONE = ("lost", "starting")


@dataclass(frozen=True, slots=True)
class Hung:
    """`comes_back`: it was to, in its other role."""

    name: str
    pid: int
    comes_back: bool


class HungOnes:
    def __init__(self, silent_s: float, unwatched_s: float) -> None:
        """Silence counts from `silent_s` on; what was seen before nobody looked for `unwatched_s` says nothing."""
        self._silent_s = silent_s
        self._unwatched_s = unwatched_s
        self._looked_at = 0.0
        self._known: dict[int, Mapping[str, Any]] = {}
        """By process id, what was last said of those that live."""
        self._silent_since: dict[int, float] = {}

    def look(self, rows: Iterable[Mapping[str, Any]], living: Collection[int], now: float) -> list[Hung]:
        """`rows`: of /admin/workers, as of `now` or later; `living`: the process ids of our children."""
        if now - self._looked_at > self._unwatched_s:
            self._silent_since.clear()
        self._looked_at = now
        said = {row["pid"]: row for row in rows if row.get("pid") in living}
        self._known = {pid: row for pid, row in (self._known | said).items() if pid in living}
        silent = [pid for pid in self._known if pid not in said or said[pid].get("state") in GONE]
        self._silent_since = {pid: self._silent_since.get(pid, now) for pid in silent}
        return [
            Hung(str(row.get("id")), pid, row.get("becomes") is not None)
            for pid, row in self._known.items()
            if row.get("overdue") or now - self._silent_since.get(pid, now) > self._silent_s
        ]
