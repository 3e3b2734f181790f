"""What a run finds: checks with their bounds, times beside their roofs, parts that could not run; said as they come."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

RoofName = Literal["copy", "matrix"]


@dataclass(frozen=True, slots=True)
class Check:
    """Right where `found` is no more than `allowed`; NaN is wrong. `why`: what broke, where something did."""

    part: str
    what: str
    found: float
    allowed: float
    why: str = ""

    @property
    def right(self) -> bool:
        return self.found <= self.allowed


@dataclass(frozen=True, slots=True)
class Speed:
    """A median. `rate`: bytes or operations per second; `roof_share`: of what was measured, None where nothing is."""

    part: str
    what: str
    seconds: float
    rate: float
    roof: RoofName
    roof_share: float | None = None
    target: float | None = None
    """What the project aims at, as a share of the roof."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    part: str
    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """What a reader should know, and nothing depends on."""

    part: str
    what: str


Finding = Check | Speed | Skipped | Noted


@dataclass(slots=True)
class Findings:
    """`say` gets a line for each."""

    say: Callable[[str], None]
    limit_s: float
    """After which no further part begins."""
    began: float = field(default_factory=time.monotonic)
    checks: list[Check] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def all_right(self) -> bool:
        """And something was checked at all."""
        return bool(self.checks) and all(check.right for check in self.checks)

    def run(self, part: str, findings: Callable[[], Iterable[Finding]]) -> None:
        """One part to its end or to its first exception, which is a check that failed: the parts after it are still
        wanted, for a GPU may be at hand for minutes."""
        if self.passed_s > self.limit_s:
            self.add(Skipped(part, f"no time left: {self.limit_s:g} s had passed before it"))
            return
        self.say(f"[{self.passed_s:5.0f} s] {part}")
        try:
            for finding in findings():
                self.add(finding)
        except Exception as error:
            traceback.print_exc()
            first_line = next(iter(str(error).splitlines()), "")
            self.add(Check(part, "runs to its end", math.nan, 0.0, f"{type(error).__name__}: {first_line}"))

    def add(self, finding: Finding) -> None:
        match finding:
            case Check(part, what, found, allowed, why):
                self.checks.append(finding)
                verdict = "ok" if finding.right else "WRONG"
                self.say(f"  {verdict:5}  {part}: {what}: {why or f'{found:.3g} of {allowed:.3g}'}")
            case Speed(part, what, seconds):
                self.speeds.append(finding)
                self.say(f"         {part}: {what}: {seconds * 1e3:.3f} ms")
            case Skipped(part, why):
                self.skipped.append(finding)
                self.say(f"  -      {part}: {why}")
            case Noted(part, what):
                self.noted.append(finding)
                self.say(f"         {part}: {what}")
