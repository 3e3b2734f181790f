"""The lanes of the coordinator's queue, in the order in which they are served. Pure.

Made for a hundred thousand that wait, in one lane or in as many: giving one out takes the logarithm of how many lanes
there are, an insertion a search in one lane. Lanes stand in a heap by (class, counter, place of the first). All three
of these only rise while a lane has somebody, but for the place, which a newcomer with an earlier deadline takes down:
then the lane is put in again and its older record is void. So a record is never too late, and one that is too early is
found when it comes to the top.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from common.ordering import Lane, Place
from common.request import RequestId
from common.shares import Shares

_SPARE_RECORDS = 64
LEVELLED = 64

Rank = tuple[int, float, Place]
"""Class, what its lane's counter comes to before it, place: who is served first has the least."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`cost`: what its lane is charged when it is given out. `longest`: prompt and answer together, if it comes to all
    that it may."""

    id: RequestId
    lane: Lane
    place: Place
    tokens: int
    since: float
    longest: int = 0
    cost: float = 0.0
    tier: str = ""


_Record = tuple[int, float, Place, Lane]


@dataclass(slots=True)
class _Total:
    """Of a lane, or of all of a class."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0

    def count(self, entry: Entry, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * entry.tokens
        self.cost += sign * entry.cost


@dataclass(slots=True)
class _Line:
    entries: list[Entry] = field(default_factory=list)
    record: _Record | None = None  # the one of this lane in the heap that counts
    total: _Total = field(default_factory=_Total)


def _place(entry: Entry) -> Place:
    return entry.place


class Lanes:
    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._lines: dict[Lane, _Line] = {}
        self._heaps: dict[int, list[_Record]] = {}  # by class
        self._classes: list[int] = []  # those with a heap, in order
        self._totals: dict[int, _Total] = {}  # by class

    def push(self, entry: Entry) -> None:
        line = self._lines.get(entry.lane)
        if line is None:
            number = entry.lane[0]
            self.shares.comes(entry.lane, self._least_counter(number))
            line = self._lines[entry.lane] = _Line()
            if number not in self._heaps:
                insort(self._classes, number)
                self._heaps[number] = []
        insort(line.entries, entry, key=_place)
        for total in (line.total, self._totals.setdefault(entry.lane[0], _Total())):
            total.count(entry, 1)
        if line.entries[0] is entry:
            self._put_in(entry.lane, line)

    def remove(self, entry: Entry) -> None:
        line = self._lines[entry.lane]
        for total in (line.total, self._totals[entry.lane[0]]):
            total.count(entry, -1)
        # Places are unique (an arrival is), so this is exact; most often it is the first.
        del line.entries[bisect_left(line.entries, entry.place, key=_place)]
        if not line.entries:
            del self._lines[entry.lane]
            self.shares.goes(entry.lane)
            self._drop_empty(entry.lane[0])

    def in_order(self, wanted: Callable[[Entry], bool]) -> Generator[tuple[Rank, Entry]]:
        """Those that are `wanted`, who is next first: as if each were given out, so that lanes alternate. To be read to
        where it is enough, with nothing pushed or removed meanwhile."""
        for number in list(self._classes):
            yield from self._of_class(number, wanted)

    def service_gap(self) -> float:
        """Between two lanes of one class that somebody stands in: how far their counters are apart at most."""
        by_class: dict[int, list[float]] = {}
        for lane in self._lines:
            by_class.setdefault(lane[0], []).append(self.shares.counter(lane))
        return max((max(counters) - min(counters) for counters in by_class.values()), default=0.0)

    def before(self, lane: Lane) -> tuple[float, float]:
        """Requests and prompt tokens that are served before one that comes to `lane` now, as things stand: those of
        better classes and of its own lane, and of every other one of its class what brings it level. More than
        LEVELLED lanes are taken to be alike."""
        own = self._lines[lane].total if lane in self._lines else _Total()
        least = self._least_counter(lane[0]) or 0.0
        level = max(self.shares.counter(lane), least) + own.cost
        better = [total for number, total in self._totals.items() if number < lane[0]]
        requests = float(own.requests + sum(total.requests for total in better))
        tokens = float(own.tokens + sum(total.tokens for total in better))
        for total, counter, alike in self._others(lane, own, least):
            served = min(1.0, alike * max(0.0, level - counter) / total.cost) if total.cost > 0 else 1.0
            requests += served * total.requests
            tokens += served * total.tokens
        return requests, tokens

    def around(self, lane: Lane, place: Place, most: int) -> tuple[list[Entry], list[Entry]]:
        """Who is served before one that comes there now, and who of its class behind it, both in order, no more than
        `most` together."""
        level = max(self.shares.counter(lane), self._least_counter(lane[0]) or 0.0)
        before: list[Entry] = []
        behind: list[Entry] = []
        with closing(self.in_order(lambda entry: True)) as order:
            for (number, counter, at), entry in islice(order, most):
                if number > lane[0]:
                    break
                if number == lane[0] and not behind:
                    if at > place if entry.lane == lane else (counter, at) > (level, place):
                        behind.append(entry)
                        continue
                    level += entry.cost if entry.lane == lane else 0.0
                (behind or before).append(entry)
        return before, behind

    def _others(self, lane: Lane, own: _Total, least: float) -> list[tuple[_Total, float, int]]:
        """Lanes of its class, each with its counter, or all of them together."""
        if len(self._lines) <= LEVELLED:
            others = [
                (other, line) for other, line in self._lines.items() if other[0] == lane[0] and other != lane
            ]
            return [(line.total, self.shares.counter(other), 1) for other, line in others]
        of_class = self._totals.get(lane[0], own)
        rest = _Total(
            of_class.requests - own.requests, of_class.tokens - own.tokens, of_class.cost - own.cost
        )
        return [(rest, least, len(self._lines))] if rest.requests else []

    def rank(self, entry: Entry, within: int) -> Rank | None:
        """Where it stands, None where more than `within` of its lane stand before it."""
        entries = self._lines[entry.lane].entries
        index = bisect_left(entries, entry.place, key=_place)
        if index > within:
            return None
        before = sum(other.cost for other in entries[:index])
        return (entry.lane[0], self.shares.counter(entry.lane) + before, entry.place)

    # ------------------------------------------------------------ inside

    def _of_class(self, number: int, wanted: Callable[[Entry], bool]) -> Generator[tuple[Rank, Entry]]:
        """`ahead` holds the lanes looked at so far, each by its next entry; more are taken from the heap while one
        there may come first, and all go back in the end."""
        heap = self._heaps[number]
        ahead: list[tuple[float, Place, Lane, int]] = []
        taken: list[_Record] = []
        try:
            while True:
                record = self._first(number)
                if record is not None and (not ahead or record[1:3] < ahead[0][:2]):
                    taken.append(heappop(heap))
                    _, counter, _, lane = record
                    index = self._next_wanted(lane, 0, wanted)
                    if index is not None:
                        heappush(ahead, (counter, self._lines[lane].entries[index].place, lane, index))
                    continue
                if not ahead:
                    return
                counter, place, lane, index = ahead[0]
                entries = self._lines[lane].entries
                yield (number, counter, place), entries[index]
                counter += entries[index].cost
                following = self._next_wanted(lane, index + 1, wanted)
                if following is None:
                    heappop(ahead)
                else:
                    heapreplace(ahead, (counter, entries[following].place, lane, following))
        finally:
            for record in taken:
                heappush(heap, record)

    def _next_wanted(self, lane: Lane, start: int, wanted: Callable[[Entry], bool]) -> int | None:
        entries = self._lines[lane].entries
        for index in range(start, len(entries)):
            if wanted(entries[index]):
                return index
        return None

    def _first(self, number: int) -> _Record | None:
        """The top of a class's heap, once that is how things stand."""
        heap = self._heaps[number]
        while heap:
            record = heap[0]
            line = self._lines.get(record[3])
            if line is None or line.record is not record:
                heappop(heap)
                continue
            present = (number, self.shares.counter(record[3]), line.entries[0].place, record[3])
            if present == record:
                return record
            line.record = present
            heapreplace(heap, present)
        return None

    def _least_counter(self, number: int) -> float | None:
        record = self._first(number) if number in self._heaps else None
        return None if record is None else record[1]

    def _put_in(self, lane: Lane, line: _Line) -> None:
        heap = self._heaps[lane[0]]
        line.record = (lane[0], self.shares.counter(lane), line.entries[0].place, lane)
        heappush(heap, line.record)
        if len(heap) > 2 * len(self._lines) + _SPARE_RECORDS:
            heap[:] = [record for record in heap if self._counts(record)]
            heapify(heap)

    def _counts(self, record: _Record) -> bool:
        line = self._lines.get(record[3])
        return line is not None and line.record is record

    def _drop_empty(self, number: int) -> None:
        if self._first(number) is None:
            del self._heaps[number]
            del self._totals[number]
            del self._classes[bisect_left(self._classes, number)]
