"""How many KV blocks a worker on this device may make: what was asked for, held against what is there."""

import torch

from kernels.cache import AskedTooMuch, CacheLayout
from kernels.device import gib, memory_bytes

CPU_KV_CACHE_BYTES = 512 << 20
"""Where nothing is asked for. A GPU is profiled instead: `kernels.gpu.memory`."""


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
