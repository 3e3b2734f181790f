"""A bare pool that is reached as one on a device is: by kernels, in Triton's interpreter, and between processes by the
driver of `tests/kernels/gpu/host_driver.c`, whose devices' memory is the host's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from common.counters import Counters
from common.messages import Sender
from kernels.gpu.block_copies import BlockCopies
from kernels.gpu.device_pool import CudaPool
from kernels.gpu.driver import Driver
from kernels.shared_pool import PoolOnDevice
from tests.kernels.gpu.host_driver import HostMemory
from tests.transfer.bare_pool import ON_DEVICE, BarePool
from transfer.channel import ReceivingEnd, SendingEnd
from transfer.own_channels import receiving_ends, sending_ends
from transfer.segment import PoolSegment


class DevicePool(BarePool):
    """It begins in the midst of its allocation, as torch's tensors do. A test may look at its memory all the same."""

    before_bytes = 8192

    def __init__(
        self, num_blocks: int, block_bytes: int, *, can_be_shared: bool = True, library: str = ""
    ) -> None:
        super().__init__(num_blocks, block_bytes)
        library = library or os.environ[ON_DEVICE]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.tensor = whole[self.before_bytes :].view(num_blocks, block_bytes)
        self._copies = BlockCopies(self.tensor)
        self._driver = Driver(library)
        self._host = HostMemory(library)
        self._address = whole.data_ptr()
        assert self.segment.fd is not None
        self._host.add(self._address, len(whole), self.segment.fd, can_be_shared=can_be_shared)

    def on_device(self) -> PoolOnDevice:
        return CudaPool(self.tensor, self._copies, self._driver)

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        return self._copies.read(blocks)

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        return self._copies.write(blocks, sources)

    def sending(self, transfer: str, me: Sender) -> list[SendingEnd]:
        """Without a segment: a device's memory is none."""
        return list(sending_ends(transfer, me, self, PoolSegment(), self.on_device))

    def receiving(
        self, transfer: str, me: Sender, counters: Counters, host: str = "127.0.0.1"
    ) -> list[ReceivingEnd]:
        return list(receiving_ends(transfer, me, counters, self.block_bytes, self.on_device, host))

    def close(self) -> None:
        self._host.free(self._address)
        del self.tensor, self._copies  # they look at the memory
        super().close()
