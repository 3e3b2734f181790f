"""How a pool on a device is told of to other processes of its host, and what they can do with it. No torch here.

What gives it on CUDA is `kernels/gpu/device_pool.py`; who carries it between processes need not know devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CannotShare(Exception):
    """A pool that cannot be shown or be seen; the message says why."""


@dataclass(frozen=True, slots=True)
class SharedPool:
    """`handle`: the driver's, of the allocation that holds the pool, 64 bytes; the pool begins `offset` bytes into it
    and has `size`. `device`: what its device is called in every process, 16 bytes."""

    handle: bytes
    offset: int
    size: int
    device: bytes


class SeenPool(Protocol):
    """Another process's pool, in this one's address space, until `close`."""

    def bring(self, sources: Sequence[int], targets: Sequence[int]) -> Sequence[int]:
        """Copies blocks of it into blocks of the pool that it was seen by, none of these twice; the hash of each copy
        (`kernels/block_hash.py`), from 0 to 2^64 - 1."""
        ...

    def close(self) -> None: ...


class PoolOnDevice(Protocol):
    """A process's own pool on a device."""

    def shared(self) -> SharedPool:
        """Raises CannotShare."""
        ...

    def hashes(self, blocks: Sequence[int]) -> Sequence[int]:
        """Of each, as `SeenPool.bring` has them."""
        ...

    def see(self, pool: SharedPool) -> SeenPool:
        """Raises CannotShare."""
        ...
