"""Blocks of a pool that this host's memory does not hold, several at once: here between tensors on the CPU, by the
kernels in Triton's interpreter."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash

from kernels.gpu import block_copies
from kernels.gpu.block_copies import BLOCKS, BlockCopies

BLOCK = 4096


def some_pool(num_blocks: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, BLOCK), dtype=torch.uint8)


def content(pool: torch.Tensor, blocks: list[int]) -> list[bytes]:
    return [bytes(pool[block].numpy()) for block in blocks]


def test_what_is_read_and_written_is_there_and_nothing_else_is_touched() -> None:
    pool = some_pool(5)
    copies = BlockCopies(pool)
    assert list(map(bytes, copies.read([3, 0]))) == content(pool, [3, 0])
    others = content(pool, [0, 2, 4])
    new = [random.Random(seed).randbytes(BLOCK) for seed in (1, 2)]
    checksums = copies.write([3, 1], [new[0], memoryview(new[1])])
    assert list(checksums) == [xxhash.xxh3_64_intdigest(data) for data in new]
    assert content(pool, [3, 1]) == new and content(pool, [0, 2, 4]) == others
    assert copies.read([]) == [] and list(copies.write([], [])) == []


@pytest.mark.parametrize("blocks_in_piece", [1, 3, BLOCKS])
def test_more_than_a_piece_or_a_message_holds_goes_in_several(
    blocks_in_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copies, "PIECE_BYTES", blocks_in_piece * BLOCK)
    source, target = some_pool(40), some_pool(40)
    order = random.Random(0).sample(range(40), 29)
    read = BlockCopies(source).read(order)
    assert list(map(bytes, read)) == content(source, order)
    BlockCopies(target).write(order, read)
    assert torch.equal(target[order], source[order])
    left = [block for block in range(40) if block not in order]
    assert not target[left].eq(source[left]).all()


def test_a_source_that_is_no_block_long_writes_nothing() -> None:
    pool = some_pool(2)
    before = pool.clone()
    for sources in ([bytes(BLOCK), bytes(BLOCK - 1)], [bytes(BLOCK)]):
        with pytest.raises(ValueError):
            BlockCopies(pool).write([0, 1], sources)
    assert torch.equal(pool, before)


def test_each_direction_has_memory_of_its_own() -> None:
    pool = some_pool(16)
    copies = BlockCopies(pool)
    before = content(pool, [0, 1])
    read = copies.read([0, 1])
    copies.write([0, 1], [bytes(BLOCK), bytes(BLOCK)])
    assert list(map(bytes, read)) == before, "until the next reading"


def test_threads_take_turns() -> None:
    """In one direction: Triton's interpreter, unlike a device, runs one kernel at a time."""
    pool = some_pool(16)
    copies = BlockCopies(pool)

    def write(number: int) -> None:
        blocks = [number % 16, (number + 3) % 16]
        copies.write(blocks, [bytes([block]) * BLOCK for block in blocks])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(100)))
    assert all(pool[block].eq(block).all() for block in range(16))
