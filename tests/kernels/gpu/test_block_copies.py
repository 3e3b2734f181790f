"""Blocks of a pool that this host's memory does not hold, copied one by one: here between two tensors on the CPU."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.gpu.block_copies import BlockCopies


def test_what_was_read_stays_and_what_was_written_is_there() -> None:
    pool = torch.randint(0, 256, (5, 4096), dtype=torch.uint8)
    copies = BlockCopies(pool)
    before = bytes(pool[3].numpy())
    read = copies.read(3)
    other = random.Random(0).randbytes(4096)
    copies.write(3, memoryview(other))
    assert bytes(read) == before, "a copy of the caller's own"
    assert bytes(pool[3].numpy()) == other == bytes(copies.read(3))
    assert bytes(copies.read(2)) == bytes(pool[2].numpy())


def test_threads_take_turns() -> None:
    pool = torch.arange(16, dtype=torch.uint8).repeat_interleave(1 << 16).view(16, -1)
    copies = BlockCopies(pool)

    def turn(number: int) -> None:
        block = number % 16
        copies.write(block, memoryview(bytes([block]) * (1 << 16)))
        assert set(copies.read(block)) == {block}

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(turn, range(200)))
    assert all(pool[block].eq(block).all() for block in range(16))
