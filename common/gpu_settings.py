"""Settings of a worker whose model runs on a GPU; one on a CPU passes them over."""

from __future__ import annotations

from common.flags import flag
from common.http_settings import Strict


class GpuSettings(Strict):
    gpu_memory_utilization: float = flag(
        0.9,
        "share of a GPU's memory that weights, steps and KV cache of one worker may take together: what the first two "
        "leave is the cache, where neither --num-kv-blocks nor --kv-cache-memory says its size; the workers of "
        "`kvferry serve` share it",
        "cache",
        gt=0,
        le=1,
        metavar="SHARE",
    )
    enforce_eager: bool = flag(
        False, "no CUDA graphs: each decode step is launched kernel by kernel, the same bits slower", "engine"
    )
