"""The device that a model runs on: which, how much memory it has, and what a runner is told where it is a GPU."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class OnGpu:
    """What a runner is told that is a GPU's only: the worker's share of all its memory (above 0, at most 1), the
    tokens of its largest step, whether decode steps are launched kernel by kernel, without CUDA graphs, and whether
    chunks take large tiles, whose bits are not those of decode rows."""

    memory_share: float = 0.9
    step_tokens: int = 2048
    eager: bool = False
    fast_chunks: bool = False


def resolve_device(asked: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(asked)


def memory_bytes(place: torch.device) -> int:
    """All memory that a process may have there: of the GPU, or of the machine within the container's limit."""
    if place.type == "cuda":
        return torch.cuda.get_device_properties(place).total_memory
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
