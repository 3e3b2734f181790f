"""A pool on a CUDA device that other processes of its host read in place, by CUDA IPC, and how this one reads theirs.

The pool lies somewhere in an allocation of torch's, so what is handed over is the whole allocation's handle and where
in it the pool begins. Reading is a kernel of the reader's: it copies blocks from the other pool into its own and hashes
what it copied, on the stream beside the steps. No byte passes the host.

What CUDA IPC cannot do, and is refused here in words: memory of `expandable_segments` (mapped piece by piece, it has no
such handle), and a device that this process does not see or cannot read.

What it does not give. Whoever has opened an allocation could write it: unlike with a sealed memfd
(`transfer/segment.py`), that only its owner writes a pool is a rule of ours alone. And what a reader finds in memory
whose owner has died is left undefined: a pool lives as long as its process, and who hears that it ended reads no more.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from kernels.gpu.block_copies import BlockCopies
from kernels.gpu.driver import Driver, DriverError
from kernels.shared_pool import CannotShare, SharedPool

log = logging.getLogger(__name__)


class CudaPool:
    """`blocks` `[num_blocks, block_bytes]` uint8; `copies` are of the same."""

    def __init__(self, blocks: torch.Tensor, copies: BlockCopies, driver: Driver) -> None:
        self._blocks = blocks
        self._copies = copies
        self._driver = driver
        self._device = blocks.device.index or 0  # a CPU, whose kernels are interpreted, has none

    def shared(self) -> SharedPool:
        driver, start = self._driver, self._blocks.data_ptr()
        try:
            with driver.context(self._device):
                if not driver.can_be_shared(start):
                    raise CannotShare(
                        "memory of this kind cannot be shown to other processes; if PYTORCH_CUDA_ALLOC_CONF (or "
                        "PYTORCH_ALLOC_CONF) says expandable_segments:True, leave that out"
                    )
                base, _ = driver.address_range(start)
                handle = driver.handle(base)
            return SharedPool(handle, start - base, self._blocks.numel(), driver.uuid(self._device))
        except DriverError as error:
            raise CannotShare(str(error)) from error

    def hashes(self, blocks: Sequence[int]) -> Sequence[int]:
        return self._copies.hashes(blocks)

    def see(self, pool: SharedPool) -> SeenOnDevice:
        driver, block_bytes = self._driver, self._blocks.shape[1]
        try:
            self._check_device(pool.device)
            with driver.context(self._device):
                base = driver.open(pool.handle)
                try:
                    found, size = driver.address_range(base)
                    if found != base or pool.offset + pool.size > size or pool.size % block_bytes:
                        raise CannotShare(
                            f"its pool of {pool.size} bytes from {pool.offset} on is not in its allocation of {size}"
                        )
                    blocks = _tensor_at(base + pool.offset, pool.size, self._blocks.device)
                except BaseException:
                    driver.close(base)
                    raise
        except DriverError as error:
            raise CannotShare(str(error)) from error
        return SeenOnDevice(blocks.view(-1, block_bytes), self._copies, driver, self._device, base)

    def _check_device(self, uuid: bytes) -> None:
        """The other's device must be this one's, or one that this one can read."""
        driver = self._driver
        numbers = {driver.uuid(number): number for number in range(driver.num_devices())}
        theirs = numbers.get(uuid)
        if theirs is None:
            raise CannotShare(
                "its pool is on a device that this process does not see (CUDA_VISIBLE_DEVICES?)"
            )
        if theirs != self._device and not driver.can_access(self._device, theirs):
            raise CannotShare("its pool is on another device, which this one cannot read: no peer access")


class SeenOnDevice:
    """`blocks` `[num_blocks, block_bytes]`: the other process's, at `base` here."""

    def __init__(
        self, blocks: torch.Tensor, copies: BlockCopies, driver: Driver, device: int, base: int
    ) -> None:
        self._blocks: torch.Tensor | None = blocks
        self._copies = copies
        self._driver = driver
        self._device = device
        self._base = base

    def bring(self, sources: Sequence[int], targets: Sequence[int]) -> Sequence[int]:
        assert self._blocks is not None, "closed"
        return self._copies.bring(self._blocks, sources, targets)

    def close(self) -> None:
        self._blocks = None
        try:
            with self._driver.context(self._device):
                self._driver.close(self._base)
        except DriverError as error:  # of a device that is broken: this process's end closes what is open
            log.warning("another process's pool could not be closed: %s", error)


class _Memory:
    """What torch makes a tensor of."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 `[size]` over memory that stays somebody else's. Raises CannotShare."""
    if device.type != "cuda":  # kernels run in the interpreter, and a device's memory is the host's
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    try:
        # With its number: without one, some releases copy to whatever device they take for the current one.
        found = torch.as_tensor(_Memory(address, size), device=device)
    except (RuntimeError, TypeError) as error:
        raise CannotShare(f"torch takes no memory of another process: {error}") from error
    if found.data_ptr() != address:
        raise CannotShare("torch copies another device's memory instead of looking at it")
    return found
