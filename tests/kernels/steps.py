"""Step layouts for tests of single kernels."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.step import StepLayout


def make_step(
    rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int
) -> StepLayout:
    """rows: (start, count) each; tables: the blocks of each."""
    width = max(len(table) for table in tables)
    padded = np.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=np.int32)
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    return StepLayout.make(starts, counts, padded, block_size, torch.device("cpu"))
