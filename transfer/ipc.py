"""The channel between two pools on devices of one host: the receiver's device reads the sender's pool in place.

What comes through the receiver's door (`door.py`) is the handle of the allocation that the sender's pool lies in, and
where in it (`kernels/shared_pool.py`). The receiver opens it, and its device copies and hashes blocks from one pool
into the other: no byte of a block passes the host or a socket. The checksum is the device's (`kernels/block_hash.py`),
of the receiver's copy, as everywhere: a block may be another while it is read (the argument: `door.py`).

No event says that a block is complete: the sender's step has been waited for before its blocks are announced, and the
receiver's copies before a step reads them (`kernels/gpu/block_copies.py`).

Not run on a GPU so far. On a CPU the same code is tested over a driver that shares host memory in its place
(`tests/kernels/gpu/host_driver.c`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.counters import Counters
from common.messages import Block, DevicePool, PeerAddress, Sender
from kernels.shared_pool import CannotShare, PoolOnDevice, SeenPool, SharedPool
from transfer.channel import Arrived, Elsewhere, Outbound
from transfer.door import DoorReceiving, DoorSending
from transfer.segment import CannotMap


def ipc_sending(me: Sender, pool: PoolOnDevice, block_bytes: int) -> DoorSending:
    """Raises CannotShare."""
    return DoorSending("ipc", me, _Shown(pool, pool.shared(), block_bytes))


def ipc_receiving(
    me: Sender, counters: Counters, pool: PoolOnDevice, block_bytes: int
) -> DoorReceiving[DevicePool]:
    """Raises OSError or AttributeError where this system has no such sockets."""
    return DoorReceiving("ipc", me, counters, block_bytes, _Viewer(pool))


class _Shown:
    def __init__(self, pool: PoolOnDevice, shared: SharedPool, block_bytes: int) -> None:
        self._pool = pool
        self._shared = shared
        self._block_bytes = block_bytes

    def hello(self, target: PeerAddress) -> tuple[DevicePool, Sequence[int]]:
        shared = self._shared
        who = (target.worker, target.incarnation)
        return DevicePool(
            *who, shared.size, self._block_bytes, shared.handle, shared.offset, shared.device
        ), []

    def pack(self, blocks: Sequence[Outbound]) -> list[Block]:
        size = self._block_bytes
        hashes = self._pool.hashes([block for _, _, block in blocks])
        return [
            Block(*key, index, part=0, checksum=hash, size=size, channel="ipc", offset=block * size)
            for (key, index, block), hash in zip(blocks, hashes, strict=True)
        ]

    def close(self) -> None:
        """The pool is its process's, and stays for whoever has it open."""


class _Viewer:
    hello = DevicePool
    num_fds = 0

    def __init__(self, pool: PoolOnDevice) -> None:
        self._pool = pool

    def view(self, message: DevicePool, fds: Sequence[int]) -> _View:
        shared = SharedPool(message.handle, message.offset, message.size, message.device)
        try:
            return _View(self._pool.see(shared), message.size, message.block_bytes)
        except CannotShare as error:
            raise CannotMap(str(error)) from error


class _View:
    def __init__(self, pool: SeenPool, size: int, block_bytes: int) -> None:
        self._pool = pool
        self._size = size
        self._block_bytes = block_bytes

    @contextmanager
    def of(self, headers: Sequence[Block]) -> Iterator[Sequence[Arrived]]:
        yield [(header, self._block(header)) for header in headers]

    def _block(self, header: Block) -> Elsewhere | memoryview:
        block, within = divmod(header.offset, self._block_bytes)
        if within or header.size != self._block_bytes or header.offset + header.size > self._size:
            return memoryview(b"")
        return Elsewhere(self._pool, block, header.size)

    def close(self) -> None:
        self._pool.close()
