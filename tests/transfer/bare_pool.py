"""A pool without a model: the bytes of its blocks, in a segment that other processes may map, and no torch."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import lru_cache

from common.counters import Counters
from common.messages import ChannelName, Sender
from kernels.block_bytes import copy_blocks
from transfer.channel import ReceivingEnd, SendingEnd
from transfer.own_channels import receiving_ends, sending_ends
from transfer.segment import PoolSegment

CHANNELS: tuple[ChannelName, ...] = ("tcp", "shm", "gloo")
ON_DEVICE = "KVFERRY_TEST_ON_DEVICE"
"""In the environment, the driver's library: pools are reached as a device's are, here and in what is started."""


class BarePool:
    """`fill` puts bytes into block i that are a function of i and `what`, and of nothing else."""

    before_bytes = 0
    """Of its memory, before block 0."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.segment = PoolSegment()
        memory = self.segment.allocate(self.before_bytes + num_blocks * block_bytes)
        assert memory is not None, self.segment.fault
        self._memory = memory
        self._bytes = memoryview(memory)
        zeros = bytes(block_bytes)
        for block in range(num_blocks):  # touches every page now, as the real one does
            self.write_block(block, zeros)

    def host_block(self, block: int) -> memoryview:
        start = self.before_bytes + block * self.block_bytes
        return self._bytes[start : start + self.block_bytes]

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self.host_block(block) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        return copy_blocks(self.read_blocks(blocks), sources)

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        self.host_block(block)[:] = data

    def fill(self, what: str = "") -> None:
        for block in range(self.num_blocks):
            self.write_block(block, content_of(block, self.block_bytes, what))

    def sending(self, transfer: str, me: Sender) -> list[SendingEnd]:
        return list(sending_ends(transfer, me, self, self.segment))

    def receiving(
        self, transfer: str, me: Sender, counters: Counters, host: str = "127.0.0.1"
    ) -> list[ReceivingEnd]:
        return list(receiving_ends(transfer, me, counters, self.block_bytes, host=host))

    def close(self) -> None:
        self.segment.close()
        self._bytes.release()
        self._memory.close()


def new_pool(num_blocks: int, block_bytes: int) -> BarePool:
    if ON_DEVICE not in os.environ:
        return BarePool(num_blocks, block_bytes)
    from tests.transfer.device_pool import DevicePool  # torch and Triton: two seconds

    return DevicePool(num_blocks, block_bytes)


@lru_cache(maxsize=64)
def content_of(block: int, block_bytes: int, what: str = "") -> bytes:
    return random.Random(f"{block} {what}").randbytes(block_bytes)
