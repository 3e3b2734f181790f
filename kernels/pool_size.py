"""How many KV blocks a worker on this device may make: what was asked for, held against what is there."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cache import AskedTooMuch, CacheLayout

CPU_KV_CACHE_BYTES = 512 << 20
"""Where nothing is asked for. A GPU is profiled instead: `kernels.gpu.memory`."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class OnGpu:
    """What a runner is told that is a GPU's only: the worker's share of all its memory (above 0, at most 1), the
    tokens of its largest step, and whether decode steps are launched kernel by kernel, without CUDA graphs."""

    memory_share: float = 0.9
    step_tokens: int = 2048
    eager: bool = False


def asked_blocks(
    layout: CacheLayout, place: torch.device, asked: int | None, kv_cache_bytes: int | None
) -> int | None:
    """How many blocks were asked for, None where a GPU's memory is to say. Checked before the weights are read, so
    that a slip is answered at once: raises AskedTooMuch."""
    if asked is not None:
        flag, count = f"--num-kv-blocks {asked}", asked
    elif kv_cache_bytes is not None:
        flag, count = f"--kv-cache-memory {kv_cache_bytes}", kv_cache_bytes // layout.block_bytes
    elif place.type == "cuda":
        return None
    else:
        raise ValueError("give num_blocks or kv_cache_bytes")
    if count < 1:
        raise AskedTooMuch(f"{flag}: one KV block of this model takes {layout.block_bytes} bytes")
    there = memory_bytes(place)
    if count * layout.block_bytes > there:
        raise AskedTooMuch(
            f"{flag}: {gib(count * layout.block_bytes)} of KV cache, and {place} has {gib(there)} in all"
        )
    return count


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
