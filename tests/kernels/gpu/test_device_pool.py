"""A pool in sight of another process: what is handed over, what is refused, and whose hash decides. The device is this
host's memory, its driver `host_driver.c`, its kernels run in Triton's interpreter; the two processes are one here and
two in `tests/transfer/test_ipc.py`."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from kernels.block_hash import block_hash
from kernels.gpu.block_copies import BlockCopies
from kernels.gpu.device_pool import CudaPool
from kernels.gpu.driver import Driver
from kernels.shared_pool import CannotShare, SharedPool
from tests.kernels.gpu.host_driver import HostMemory, build

BLOCK = 4096
BEFORE = 3 * mmap.PAGESIZE  # what else lies in the allocation
NUM_BLOCKS = 5
ENOUGH = 8


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("driver")))


@contextmanager
def pool_in_an_allocation(library: str, *, can_be_shared: bool = True) -> Iterator[torch.Tensor]:
    """`[NUM_BLOCKS, BLOCK]`, BEFORE bytes into an allocation of which it is not all."""
    size = BEFORE + NUM_BLOCKS * BLOCK + mmap.PAGESIZE
    fd = os.memfd_create("device")
    os.ftruncate(fd, size)
    memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    memory[:] = torch.frombuffer(bytearray(random.Random(0).randbytes(size)), dtype=torch.uint8)
    host = HostMemory(library)
    host.add(memory.data_ptr(), size, fd, can_be_shared=can_be_shared)
    try:
        yield memory[BEFORE : BEFORE + NUM_BLOCKS * BLOCK].view(NUM_BLOCKS, BLOCK)
    finally:
        host.free(memory.data_ptr())
        os.close(fd)
        assert host.contexts() == 0


def own(blocks: torch.Tensor, library: str) -> CudaPool:
    return CudaPool(blocks, BlockCopies(blocks), Driver(library))


def reader(library: str, num_blocks: int = 8) -> tuple[torch.Tensor, CudaPool]:
    blocks = torch.zeros((num_blocks, BLOCK), dtype=torch.uint8)
    return blocks, own(blocks, library)


def unsigned(blocks: torch.Tensor) -> list[int]:
    return [int(one) % 2**64 for one in block_hash(blocks.numpy())]


def mapped_pools() -> int:
    gc.collect()  # what a test before this one has left in a cycle
    with open("/proc/self/maps") as maps:
        return sum("memfd:device" in line for line in maps)


def test_blocks_come_whole_from_where_the_pool_lies_in_its_allocation(library: str) -> None:
    with pool_in_an_allocation(library) as theirs:
        sender = own(theirs, library)
        shared = sender.shared()
        assert (shared.offset, shared.size) == (BEFORE, NUM_BLOCKS * BLOCK)
        assert shared.device == b"host device no.0"
        before = mapped_pools()
        mine, receiver = reader(library)
        seen = receiver.see(shared)
        hashes = seen.bring([4, 0, 2], [1, 7, 0])
        assert torch.equal(mine[[1, 7, 0]], theirs[[4, 0, 2]]) and not mine[[2, 3, 4, 5, 6]].any()
        assert list(hashes) == unsigned(theirs[[4, 0, 2]]) == list(sender.hashes([4, 0, 2]))
        assert min(hashes) >= 0
        theirs[4] = 9
        assert list(seen.bring([4], [1])) == unsigned(mine[1:2]) != list(hashes[:1]), (
            "of the copy, as it is now"
        )
        assert mapped_pools() == before + 1
        seen.close()
        assert mapped_pools() == before
        with pytest.raises(AssertionError, match="closed"):
            seen.bring([0], [0])


def test_many_blocks_come_at_once_and_none_is_no_kernel(library: str) -> None:
    with pool_in_an_allocation(library) as theirs:
        sender = own(theirs, library)
        mine, receiver = reader(library, 40)
        seen = receiver.see(sender.shared())
        sources = [number % NUM_BLOCKS for number in range(37)]
        hashes = seen.bring(sources, list(range(3, 40)))
        assert torch.equal(mine[3:], theirs[sources]) and list(hashes) == unsigned(theirs[sources])
        assert list(sender.hashes(sources)) == list(hashes)
        assert list(seen.bring([], [])) == [] == list(sender.hashes([]))
        seen.close()


def test_memory_that_has_no_handle_is_refused_with_its_likely_cause(library: str) -> None:
    why = r"PYTORCH_CUDA_ALLOC_CONF.*expandable_segments"
    with (
        pool_in_an_allocation(library, can_be_shared=False) as theirs,
        pytest.raises(CannotShare, match=why),
    ):
        own(theirs, library).shared()
    with pytest.raises(CannotShare, match="cuPointerGetAttribute: invalid argument"):
        own(torch.zeros((2, BLOCK), dtype=torch.uint8), library).shared()


REFUSED: dict[str, tuple[Callable[[SharedPool], SharedPool], str]] = {
    "a device that is not seen": (lambda pool: replace(pool, device=bytes(16)), "does not see"),
    "a device out of reach": (lambda pool: replace(pool, device=b"host device no.2"), "no peer access"),
    "another's handle": (lambda pool: replace(pool, handle=bytes(64)), "invalid resource handle"),
    "more than is there": (lambda pool: replace(pool, size=pool.size + 2 * BLOCK), "not in its allocation"),
    "beyond it": (lambda pool: replace(pool, offset=1 << 40), "not in its allocation"),
    "half a block": (lambda pool: replace(pool, size=pool.size - BLOCK // 2), "not in its allocation"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_the_pool_it_says_is_refused_and_left_closed(what: str, library: str) -> None:
    spoil, word = REFUSED[what]
    with pool_in_an_allocation(library) as theirs:
        shared = own(theirs, library).shared()
        before = mapped_pools()
        _, receiver = reader(library)
        with pytest.raises(CannotShare, match=word):
            receiver.see(spoil(shared))
        assert mapped_pools() == before


def test_a_pool_on_another_device_within_reach_is_read(library: str) -> None:
    with pool_in_an_allocation(library) as theirs:
        shared = replace(own(theirs, library).shared(), device=b"host device no.1")
        mine, receiver = reader(library)
        seen = receiver.see(shared)
        seen.bring([3], [2])
        assert torch.equal(mine[2], theirs[3])
        seen.close()


def test_a_pool_that_is_seen_twice_is_closed_twice(library: str, caplog: pytest.LogCaptureFixture) -> None:
    """A sender that connects again is in view twice for a moment."""
    with pool_in_an_allocation(library) as theirs:
        shared = own(theirs, library).shared()
        mine, receiver = reader(library)
        before = mapped_pools()
        one, other = receiver.see(shared), receiver.see(shared)
        one.close()
        other.bring([1], [1])
        assert torch.equal(mine[1], theirs[1])
        other.close()
        assert mapped_pools() == before
        other.close()
        assert "could not be closed: cuIpcCloseMemHandle: invalid argument" in caplog.text, "and no harm done"


RESTLESS_WRITER = """
import mmap, sys, time
memory = mmap.mmap(int(sys.argv[1]), 0)
one, other = (bytes([byte]) * len(memory) for byte in (1, 2))
print(flush=True)
end = time.monotonic() + 70
while time.monotonic() < end:
    memory[:] = other
    memory[:] = one
"""


def test_BR_020_what_passes_is_what_was_announced_while_the_source_changes(library: str) -> None:
    """The copy is judged, not the source: another process writes that all the time."""
    with pool_in_an_allocation(library) as theirs:
        theirs[:] = 1
        (announced,) = unsigned(theirs[:1])
        mine, receiver = reader(library)
        seen = receiver.see(own(theirs, library).shared())
        fd = next(int(fd) for fd in os.listdir("/proc/self/fd") if names_a_device(int(fd)))
        command = [sys.executable, "-I", "-c", RESTLESS_WRITER, str(fd)]
        good = bad = 0
        with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            deadline = time.monotonic() + 60
            try:
                while good < ENOUGH or bad < ENOUGH:
                    assert time.monotonic() < deadline
                    if list(seen.bring([2], [3])) == [announced]:
                        good += 1
                        assert mine[3].eq(1).all()
                    else:
                        bad += 1
            finally:
                writer.kill()
        seen.close()


def names_a_device(fd: int) -> bool:
    with suppress(OSError):
        return "memfd:device" in os.readlink(f"/proc/self/fd/{fd}")
    return False
