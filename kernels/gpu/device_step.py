"""One step's rows as the kernels see them: small integer arrays on the device.

A step that runs as a CUDA graph has one of these in buffers that stay where they are: kernels take what varies from
tensors, and only sizes from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """All tensors int32, contiguous, on one device. Row r has `counts[r]` query tokens at absolute positions
    `starts[r]` and on; they are tokens `firsts[r]` and on of the step. A row of no tokens pads a graph's batch."""

    tables: torch.Tensor
    """`[rows, width]`: pool blocks by row; past a row's last position anything."""
    starts: torch.Tensor
    counts: torch.Tensor
    firsts: torch.Tensor
    token_rows: torch.Tensor
    """`[tokens]`: the row of each token."""
    positions: torch.Tensor
    """`[tokens]`: its absolute position. Negative: the token pads a graph's batch; nothing is written for it."""
    max_count: int
    """No row has more query tokens."""
    max_end: int
    """No row has a position at or past it: what a grid is sized by."""

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)
