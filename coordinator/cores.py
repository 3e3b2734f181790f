"""Shares this machine's cores among its workers. Reads the system, decides by plain arithmetic."""

from __future__ import annotations

import os
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


def share_cores(cores: int, workers: int) -> list[int]:
    """Threads for each worker, at least one. What does not divide goes to the first ones, the prefill pool:
    prompts are bound by arithmetic, decoding by memory."""
    assert workers > 0
    each, rest = divmod(cores, workers)
    return [max(1, each + (1 if index < rest else 0)) for index in range(workers)]
