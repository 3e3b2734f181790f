"""The rate at which 90 % of requests attain their targets, from as few points as will do. Pure.

Attainment falls with the rate, so: double or halve until two neighbours lie on both sides of 90 %, then halve the
interval until it is narrow, then read the crossing off the line between its ends. A later alternation goes by the same
rates first, so that points can be pooled, and looks further only where its own do not enclose 90 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WANTED = 0.9
NARROW = 1.2  # upper over lower end of an interval that is halved no more
ENOUGH = 300
"""Requests of a point: the share of 90 % is then known to 3.5 points either way, of 100 requests to 6."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Rates are multiples of `step_per_s`, so that alternations meet."""

    lowest_per_s: float = 0.25
    highest_per_s: float = 64.0
    step_per_s: float = 0.125

    def slower(self, times: float) -> Grid:
        return Grid(self.lowest_per_s / times, self.highest_per_s / times, self.step_per_s / times)

    def near(self, rate: float) -> float:
        return max(self.lowest_per_s, round(rate / self.step_per_s) * self.step_per_s)


@dataclass(frozen=True, slots=True)
class Point:
    attained: int
    judged: int

    @property
    def share(self) -> float:
        return self.attained / self.judged if self.judged else 0.0

    def __add__(self, other: Point) -> Point:
        return Point(self.attained + other.attained, self.judged + other.judged)


Points = Mapping[float, Point]
"""Requests per second to what became of them."""


def pooled(runs: Iterable[Points]) -> dict[float, Point]:
    points: dict[float, Point] = {}
    for run in runs:
        for rate, point in run.items():
            points[rate] = points.get(rate, Point(0, 0)) + point
    return dict(sorted(points.items()))


def next_rate(points: Points, earlier: Points, start: float, grid: Grid) -> float | None:
    """The next rate to measure beside `points`; None when they say enough. `earlier`: of the alternations before."""
    for rate in sorted(earlier):
        if rate not in points and _near_crossing(rate, earlier):
            return rate
    if not points:
        return grid.near(start)
    low, high = _bounds(points)
    if high is None:
        rate = grid.near(max(points) * 2)
        return rate if rate <= grid.highest_per_s else None
    if low is None:
        return grid.near(high / 2) if high > grid.lowest_per_s else None
    middle = grid.near((low + high) / 2)
    return middle if high / low > NARROW and low < middle < high else None


def _near_crossing(rate: float, points: Points) -> bool:
    """The ends of the interval, and the points next to them: far ones tell nothing more."""
    low, high = _bounds(points)
    return (low or 0.0) / 1.5 <= rate <= (high or float("inf")) * 1.5


def _bounds(points: Points) -> tuple[float | None, float | None]:
    """The lowest rate that fails, and the highest below it that does not."""
    high = min((rate for rate, point in points.items() if point.share < WANTED), default=None)
    passing = [rate for rate, p in points.items() if p.share >= WANTED and (high is None or rate < high)]
    return max(passing, default=None), high


def crossing(points: Points) -> float:
    """Requests per second at which the share of attained is 90 %: on the line between the two points around it.
    Where all pass it is the highest rate measured, where none does 0."""
    low, high = _bounds(points)
    if low is None:
        return 0.0
    if high is None:
        return low
    above, below = points[low].share, points[high].share
    return low + (high - low) * (above - WANTED) / (above - below)


def thick_ones(points: Points) -> Points:
    """The points of ENOUGH requests, where they lie on both sides of 90 %; else all there are."""
    thick = {rate: point for rate, point in points.items() if point.judged >= ENOUGH}
    return points if None in _bounds(thick) else thick


def requests_behind(points: Points) -> int:
    """Of the thinner of the points that `crossing` is read from."""
    return min((points[rate].judged for rate in _bounds(points) if rate is not None), default=0)
