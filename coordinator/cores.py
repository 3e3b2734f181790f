"""Shares this machine's cores among its workers. Reads the system, decides by plain arithmetic."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def available_cores(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Cores that this process may use: its affinity, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = cgroup_limit.read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))


@dataclass(frozen=True, slots=True)
class Threads:
    """Of one worker. `spare` compute beside `own` where they find a core (`kernels/native/pool.c`)."""

    own: int
    spare: int = 0

    def __str__(self) -> str:
        return f"{self.own}+{self.spare}" if self.spare else str(self.own)


def share_cores(cores: int, workers: int) -> list[Threads]:
    """Threads for each worker, at least one. What does not divide goes to the first ones, the prefill pool: prompts are
    bound by arithmetic, decoding by memory. Prompts and answers come in turns, so each has as many spare ones, as
    far as there are cores: what one leaves idle another computes with, and where all are busy nobody waits for them."""
    assert workers > 0
    each, rest = divmod(cores, workers)
    parts = [max(1, each + (1 if index < rest else 0)) for index in range(workers)]
    return [Threads(part, max(0, min(part, cores - part))) for part in parts]
