"""The channel between two processes of one user on one machine: the receiver maps the sender's pool and copies.

The pool lies in a sealed memfd (`segment.py`), whose descriptor comes through the receiver's door (`door.py`, which
also says why a block may be read long after it was announced). It is handed over rather than found under /proc, so that
neither process need see the other's.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.counters import Counters
from common.messages import Block, PeerAddress, Segment, Sender
from kernels.block_bytes import checksums
from transfer.channel import Arrived, Outbound, Pool
from transfer.door import DoorReceiving, DoorSending
from transfer.segment import PoolSegment, map_to_read


def shm_sending(me: Sender, pool: Pool, segment: PoolSegment) -> DoorSending:
    """`segment` is what the pool was made in."""
    return DoorSending("shm", me, _Shown(pool, segment))


def shm_receiving(me: Sender, counters: Counters, block_bytes: int) -> DoorReceiving[Segment]:
    """Raises OSError or AttributeError where this system has no such sockets."""
    return DoorReceiving("shm", me, counters, block_bytes, _Viewer())


class _Shown:
    def __init__(self, pool: Pool, segment: PoolSegment) -> None:
        self._pool = pool
        self._segment = segment

    def hello(self, target: PeerAddress) -> tuple[Segment, Sequence[int]]:
        assert self._segment.fd is not None
        size, block_bytes = self._segment.size, self._pool.block_bytes
        return Segment(target.worker, target.incarnation, size, block_bytes), [self._segment.fd]

    def pack(self, blocks: Sequence[Outbound]) -> list[Block]:
        size = self._pool.block_bytes
        sums = checksums(self._pool.read_blocks([block for _, _, block in blocks]))
        return [
            Block(*key, index, part=0, checksum=sum, size=size, channel="shm", offset=block * size)
            for (key, index, block), sum in zip(blocks, sums, strict=True)
        ]

    def close(self) -> None:
        self._segment.close()


class _Viewer:
    hello = Segment
    num_fds = 1

    def view(self, message: Segment, fds: Sequence[int]) -> _View:
        return _View(map_to_read(fds[0], message.size))


class _View:
    """A mapping costs address space and, where it was read, entries in the page table; its memory is the sender's."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._whole = memoryview(memory)

    @contextmanager
    def of(self, headers: Sequence[Block]) -> Iterator[Sequence[Arrived]]:
        """All looks are over in the end: a mapping that is still looked at cannot be closed."""
        whole = self._whole
        ends = [header.offset + header.size for header in headers]
        sources = [
            whole[header.offset : end] if end <= len(whole) else whole[:0]
            for header, end in zip(headers, ends, strict=True)
        ]
        try:
            yield list(zip(headers, sources, strict=True))
        finally:
            for source in sources:
                source.release()

    def close(self) -> None:
        self._whole.release()
        self._memory.close()
