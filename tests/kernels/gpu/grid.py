"""What the grids of kernel tests share: which cases, and how a batch of ragged rows is made.

`KERNEL_GRID=whole` (`make kernels`) takes every case; without it each test takes the few that cover every value once.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from kernels.gpu.device_step import DeviceStep

WHOLE = os.environ.get("KERNEL_GRID") == "whole"
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8)  # query heads to KV heads
DTYPES = (torch.float32, torch.float16)  # the interpreter's bf16 is wrong


def device_step(
    starts: list[int], counts: list[int], tables: np.ndarray, device: torch.device | str = "cpu"
) -> DeviceStep:
    """`tables` `[rows, width]`."""
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - np.asarray(counts)
    positions = np.arange(len(rows)) - firsts[rows] + np.asarray(starts)[rows]

    def there(array: np.ndarray | list[int]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

    return DeviceStep(
        tables=there(tables),
        starts=there(starts),
        counts=there(counts),
        firsts=there(firsts),
        token_rows=there(rows),
        positions=there(positions),
        max_count=max(counts),
        max_end=max(np.add(starts, counts).tolist()),
    )


def scattered_tables(ends: list[int], block_size: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Block tables `[rows, width]` in no order, no block twice, and past each row's end a number of no block."""
    free = np.random.default_rng(seed).permutation(num_blocks)
    width = -(-max(ends) // block_size)
    tables = np.full((len(ends), width), 2**31 - 1, dtype=np.int32)
    for row, end in enumerate(ends):
        needed = -(-end // block_size)
        tables[row, :needed], free = free[:needed], free[needed:]
    return tables
