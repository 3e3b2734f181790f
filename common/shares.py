"""Virtual token counters: how much each lane was served, by its weight. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (VTC): service is IN_COST for each prompt token and
OUT_COST for each answer token, divided by the weight of who gets it. The lane with the least counter is next. A lane
that comes back is lifted to the least of those that wait in its class (or, where nobody waits, to what the last one
had that left): what it did not use while idle is nobody's debt.

The bound (theorem 4.4 there): between two lanes of one class that wait all the time, the counters differ by at most
U = max(IN_COST x longest prompt, OUT_COST x tokens that the running batch can hold) / least weight, so the service they
get in any interval by 2 U. What passes one that finds no room (a bounded number) comes on top.

The table is bounded: of lanes with nobody in line, the MAX_IDLE that were there last are remembered. Who is forgotten
comes back as new, at the least of those that wait: it is forgiven what it was ahead by.
"""

from __future__ import annotations

from collections import OrderedDict

from common.ordering import Lane

IN_COST = 1.0
OUT_COST = 2.0
MAX_IDLE = 4096


class Shares:
    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._counters: dict[Lane, float] = {}
        self._idle: OrderedDict[Lane, None] = OrderedDict()
        self._last_left: OrderedDict[int, float] = OrderedDict()  # class → counter

    def __len__(self) -> int:
        return len(self._counters)

    def counter(self, lane: Lane) -> float:
        return self._counters.get(lane, 0.0)

    def charge(self, lane: Lane, service: float) -> None:
        """`service` is weighted. Nothing, where the lane was forgotten meanwhile."""
        counter = self._counters.get(lane)
        if counter is not None:
            self._counters[lane] = counter + service

    def comes(self, lane: Lane, least_waiting: float | None) -> None:
        """Somebody stands in it, and nobody did. `least_waiting`: the least counter of the other lanes of its class
        that somebody stands in."""
        floor = self._last_left.get(lane[0], 0.0) if least_waiting is None else least_waiting
        self._counters[lane] = max(self._counters.get(lane, 0.0), floor)
        self._idle.pop(lane, None)

    def goes(self, lane: Lane) -> None:
        """Nobody stands in it any more."""
        self._remember(self._last_left, lane[0], self._counters[lane])
        self._idle[lane] = None
        if len(self._idle) > self._max_idle:
            forgotten, _ = self._idle.popitem(last=False)
            del self._counters[forgotten]

    def _remember(self, table: OrderedDict[int, float], key: int, value: float) -> None:
        table.pop(key, None)
        table[key] = value
        if len(table) > self._max_idle:
            table.popitem(last=False)
