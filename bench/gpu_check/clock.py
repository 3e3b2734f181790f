"""How long a call takes: on a GPU between two events, with a cold L2; in the interpreter by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 2 << 30
"""Written before each timed call: many times an L2 (60 MB on an H200), and for long enough (half a millisecond) that
the host has put the call's launches into the stream before the device gets to them."""


WARM_UPS = 3


class Clock:
    """Medians of `rounds` calls, after some that do not count (compilers, allocators, clocks of the chip)."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._rounds = rounds
        self._warm_ups = WARM_UPS if device.type == "cuda" else 0  # an interpreter has nothing to warm
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def device_s(self, call: Callable[[], object]) -> float:
        """Of the call's work on the device, nothing of which is in a cache."""
        if self._flush is None:
            return self.wall_s(call)
        for _ in range(self._warm_ups):
            call()
        timed = []
        for _ in range(self._rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            call()
            end.record()
            timed.append((begin, end))
        torch.cuda.synchronize()
        taken_ms: list[float] = [begin.elapsed_time(end) for begin, end in timed]
        return statistics.median(taken_ms) / 1e3

    def wall_s(self, call: Callable[[], object]) -> float:
        """Of a call that waits for its own work, the host's part included."""
        for _ in range(self._warm_ups):
            call()
        taken = []
        for _ in range(self._rounds):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)
