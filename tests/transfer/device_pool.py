"""A bare pool whose blocks are reached as those on a device are: by its kernels, here in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.block_copies import BlockCopies
from tests.transfer.bare_pool import BarePool


class DevicePool(BarePool):
    """Its memory is the host's all the same, so that a test can look at it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_blocks, block_bytes)
        self._copies = BlockCopies(self.tensor)

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        return self._copies.read(blocks)

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        return self._copies.write(blocks, sources)

    def close(self) -> None:
        del self.tensor, self._copies  # they look at the memory
        super().close()
