"""Targets of a request, and who met them: goodput. Pure.

A request attains its targets when its first token, *every* gap between chunks with text, its time per output token
and its end are each within what was asked. One that was refused or failed attains nothing; one that we left on
purpose, or that Ctrl-C broke off, is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.load.records import Record
from bench.load.statistics import Interval, wilson

NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Targets:
    """Milliseconds, None where nothing is asked."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in NAMES)

    def __str__(self) -> str:
        return " ".join(f"{n}:{getattr(self, n):g}" for n in NAMES if getattr(self, n) is not None)

    def met_by(self, record: Record) -> bool:
        if record.outcome != "ok":
            return False
        worst_gap_s = max(record.gaps_s, default=0.0)
        return (
            _within(record.ttft_s, self.ttft)
            and _within(worst_gap_s, self.itl)
            and _within(record.tpot_s, self.tpot)
            and _within(record.e2e_s, self.e2e)
        )


def _within(seconds: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds is None or seconds * 1e3 <= limit_ms


def parse_targets(words: Iterable[str]) -> Targets:
    """'ttft:500', 'itl:75' … in milliseconds. Raises ValueError."""
    found: dict[str, float] = {}
    for word in (part for given in words for part in re.split(r"[\s,]+", given) if part):
        name, _, value = word.partition(":")
        if name not in NAMES or name in found:
            raise ValueError(f"{word!r}: expected each of {', '.join(NAMES)} once at most, as in ttft:500")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"{word!r}: expected milliseconds after the colon") from None
        if not 0 < found[name] < float("inf"):
            raise ValueError(f"{word!r}: expected milliseconds above 0")
    return Targets(**found)


@dataclass(frozen=True, slots=True)
class Goodput:
    """`share` of the judged, with Wilson's 95 % interval; `requests_per_s` that attained all targets."""

    targets: str
    judged: int
    attained: int
    share: Interval
    requests_per_s: float


def goodput(records: Sequence[Record], targets: Targets, duration_s: float) -> Goodput:
    judged = [record for record in records if record.outcome in ("ok", "rejected", "failed")]
    attained = sum(map(targets.met_by, judged))
    rate = attained / duration_s if duration_s > 0 else 0.0
    return Goodput(str(targets), len(judged), attained, wilson(attained, len(judged)), rate)
