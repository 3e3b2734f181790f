"""Settings of a worker whose model runs on a GPU; one on a CPU passes them over."""

from __future__ import annotations

from typing import Literal

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
    attention_variant: Literal["invariant", "fast"] = flag(
        "invariant",
        "on a GPU: invariant gives a token the same bits in a chunk of a prompt and in a decode step; fast computes "
        "chunks in larger tiles, with other bits there, so that a request that is computed again elsewhere may go on "
        "otherwise. Its gain is not measured yet: bench/gpu_check.sh says it. All workers need the same",
        "engine",
    )
