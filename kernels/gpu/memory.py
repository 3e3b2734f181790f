"""Sizes the KV pool of a GPU by a profile: what the weights and the largest step leave of the worker's share.

Why the peak is torch's own count of what it reserved, and not how much less of the device is free: two workers may
start on one GPU at the same time, and each would take the other's weights for its own. What torch does not count (the
CUDA context, compiled kernels, cuBLAS's workspace) is a constant here. So each share is of the whole GPU, each worker
keeps to its own, and shares that add up to 1 or less fit; where others hold so much that the share is not there any
more, what is free decides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.cache import AskedTooMuch, CacheLayout, PagedCache
from kernels.device import OnGpu, gib
from kernels.model import CausalModel
from kernels.prompt_scores import SLICE_ROWS
from kernels.step import StepLayout

log = logging.getLogger(__name__)

UNCOUNTED_BYTES = 640 << 20
"""Of a process on a GPU, beside what torch's allocator has: context and modules 400 to 500 MiB, cuBLAS the rest.
An estimate, not measured."""
SPARE_BYTES = 64 << 20
"""Never given away of what is free: allocations that are rounded up."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes. `peak`: reserved by torch at the top of the largest step, weights included; `held`: after it.
    `graphs`: what a decode step takes beside weights, which CUDA graphs keep in a pool of their own."""

    total: int
    free: int
    peak: int
    held: int
    graphs: int = 0


def pool_blocks(profile: Profile, share: float, layout: CacheLayout) -> int:
    """How many blocks the worker's share has room for. Raises AskedTooMuch where that is not one."""
    granted = int(profile.total * share)
    needed = profile.peak + profile.graphs + UNCOUNTED_BYTES
    of_share = granted - needed
    # What the largest step needs beyond what is held now will be taken from the free memory too.
    of_free = profile.free - (profile.peak - profile.held) - profile.graphs - SPARE_BYTES
    blocks = min(of_share, of_free) // layout.block_bytes
    if blocks >= 1:
        return blocks
    what = (
        f"One KV block takes {layout.block_bytes / 2**20:.1f} MiB; weights and the largest step {gib(needed)}"
    )
    if of_share >= layout.block_bytes:
        raise AskedTooMuch(
            f"--gpu-memory-utilization {share:g}: {gib(granted)} of the GPU's {gib(profile.total)}, of which others "
            f"have left {gib(profile.free)} free. {what}: stop what else runs there, or lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    raise AskedTooMuch(
        f"--gpu-memory-utilization {share:g}: {gib(granted)} of the GPU's {gib(profile.total)}. {what}: raise it, or "
        "lower --max-num-batched-tokens or --max-num-seqs"
    )


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def start(self) -> None:
        """Gives back what is cached, and counts the peak from here."""
        ...

    def peak(self) -> int:
        """Most that this process had reserved since `start`."""
        ...

    def held(self) -> int: ...
    def free_and_total(self) -> tuple[int, int]:
        """Of the whole device, whoever holds it."""
        ...


class CudaMemory:
    def __init__(self, place: torch.device) -> None:
        self._place = place

    def start(self) -> None:
        torch.cuda.synchronize(self._place)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._place)

    def peak(self) -> int:
        torch.cuda.synchronize(self._place)
        return torch.cuda.max_memory_reserved(self._place)

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._place)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._place)


def measure(
    model: CausalModel,
    layout: CacheLayout,
    memory: DeviceMemory,
    *,
    step_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    graphs: bool,
) -> Profile:
    """Runs the two largest steps there are on a scratch cache of one block, and says what they took."""
    cache = PagedCache(layout, 1, model.device)
    with torch.inference_mode():
        memory.start()
        weights = memory.held()
        _run(model, cache, np.ones(max_num_seqs, dtype=np.int32), max_model_len)
        decode = memory.peak() - weights
        memory.start()
        _run(model, cache, largest_counts(step_tokens, max_num_seqs, max_model_len), max_model_len)
        peak = max(memory.peak(), weights + decode)
        memory.start()
    free, total = memory.free_and_total()
    return Profile(total, free, peak, memory.held(), decode if graphs else 0)


def largest_counts(step_tokens: int, max_num_seqs: int, max_model_len: int) -> np.ndarray:
    """Query tokens by row, `[rows]`: a step of `step_tokens` in as many rows as there may be, the first ones longest.
    Decode rows come on top of a step's budget only where there are more of them than it has."""
    counts = np.ones(max_num_seqs, dtype=np.int32)
    more = step_tokens - max_num_seqs
    for row in range(max_num_seqs):
        if more <= 0:
            break
        taken = min(more, max_model_len - 1)
        counts[row] += taken
        more -= taken
    return counts


def _run(model: CausalModel, cache: PagedCache, counts: np.ndarray, max_model_len: int) -> None:
    """Rows at the end of the longest sequence. All their blocks are the one there is: what it holds does not matter."""
    width = -(-max_model_len // cache.layout.block_size)
    step = StepLayout(
        max_model_len - counts,
        counts,
        np.zeros(len(counts), dtype=np.int64),
        np.zeros((1, width), dtype=np.int32),
        cache.layout.block_size,
        model.device,
    )
    token_ids = torch.zeros(step.num_tokens, dtype=torch.int64, device=model.device)
    hidden = model.forward(token_ids, step, cache)
    places = torch.arange(min(len(hidden), max(len(counts), SLICE_ROWS)), device=model.device)
    model.logits(hidden[places])


def profiled_blocks(
    model: CausalModel, layout: CacheLayout, gpu: OnGpu, max_num_seqs: int, max_model_len: int
) -> int:
    """The pool of a model that is loaded on a GPU. Raises AskedTooMuch."""
    try:
        profile = measure(
            model,
            layout,
            CudaMemory(model.device),
            step_tokens=gpu.step_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            graphs=not gpu.eager,
        )
    except torch.OutOfMemoryError as error:
        raise AskedTooMuch(
            f"a step of --max-num-batched-tokens {gpu.step_tokens} and --max-num-seqs {max_num_seqs} does not fit "
            "beside the weights: lower one of them"
        ) from error
    blocks = pool_blocks(profile, gpu.memory_share, layout)
    log.info(
        "GPU memory: %s in all, %s free; weights %s, the largest step %s more; KV cache %s, %d blocks",
        gib(profile.total),
        gib(profile.free),
        gib(profile.held),
        gib(profile.peak - profile.held),
        gib(blocks * layout.block_bytes),
        blocks,
    )
    return blocks
