"""Copies blocks between a device's pool and this host beside the steps: a stream of their own, pinned memory between.

In the stream of the steps a copy would wait for the step that runs, and the next step for the copy; from unpinned
memory it would make the driver wait for both. What keeps the two apart is known to the host, so no event is needed: a
step is over before blocks that it filled are read (its result waits for it; the step that may run by then behind it
writes elsewhere), and a copy into a block is over before `write` returns, so before a step that reads it is launched.
A block is given to a transfer when no step that is out has it.

Blocks that go together are gathered into one piece on the device and come down in one copy, or go up in one and are
scattered there: what a copy costs to begin is then paid once.

    read    pool ─ gather ─▶ piece on the device ─ copy ─▶ pinned
    write   the caller's ─ copied and hashed ─▶ pinned ─ copy ─▶ piece on the device ─ scatter ─▶ pool
    bring   another pool on the device, or within its reach ─ copied and hashed by a kernel ─▶ pool
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from kernels.block_bytes import copy_blocks
from kernels.gpu.block_moves import copy_hashed, gather_blocks, hash_blocks, scatter_blocks

BLOCKS = 8
"""What comes in one message; more at once take more pinned memory."""
PIECE_BYTES = 16 << 20
"""Of a piece on the device, where a single block is not larger. There are two, one for each direction."""


class BlockCopies:
    """`blocks` `[num_blocks, block_bytes]` uint8 on a device. From any thread; copies in one direction take turns."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._up, self._down = _Way(blocks), _Way(blocks)

    def read(self, blocks: Sequence[int]) -> list[memoryview]:
        """Their bytes; they stay until the next call."""
        way = self._down
        with way.lock:
            pinned = way.pinned(len(blocks))
            with way.stream():
                for first, some in way.pieces(blocks):
                    piece = way.piece[: len(some)]
                    gather_blocks(self._blocks, way.numbers(some), piece)
                    pinned[first : first + len(some)].copy_(piece, non_blocking=True)
                    way.wait()
            return [row.data for row in pinned.numpy()]

    def write(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        """The XXH3 of what was written. Raises ValueError, and writes nothing, where a source is not a block long. No
        block may be there twice."""
        way = self._up
        with way.lock:
            pinned = way.pinned(len(blocks))
            checksums = copy_blocks([row.data for row in pinned.numpy()], sources)
            with way.stream():
                for first, some in way.pieces(blocks):
                    piece = way.piece[: len(some)]
                    piece.copy_(pinned[first : first + len(some)], non_blocking=True)
                    scatter_blocks(piece, way.numbers(some), self._blocks)
                    way.wait()
            return checksums

    def hashes(self, blocks: Sequence[int]) -> list[int]:
        """Of each, as `kernels/block_hash.py` has it, from 0 to 2^64 - 1."""
        way, found = self._down, list[int]()
        with way.lock, way.stream():
            for _, some in way.pieces(blocks):
                found += _unsigned(hash_blocks(self._blocks, way.numbers(some)))
        return found

    def bring(self, source: torch.Tensor, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        """Copies blocks of another pool `[any number, block_bytes]` into `targets`, none of them twice; hashes of the
        copies. The source may be written meanwhile."""
        way, found = self._up, list[int]()
        with way.lock, way.stream():
            for first, some in way.pieces(blocks):
                pairs = way.numbers([*some, *targets[first : first + len(some)]]).view(2, -1)
                found += _unsigned(copy_hashed(source, self._blocks, pairs))
        return found


def _unsigned(hashes: torch.Tensor) -> list[int]:
    """Waits for them, and so for what the same kernel copied."""
    return [int(one) % 2**64 for one in hashes.tolist()]


class _Way:
    """One direction."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.lock = threading.Lock()
        _, block_bytes = blocks.shape
        rows = max(1, min(BLOCKS, PIECE_BYTES // block_bytes))
        self.piece = torch.empty((rows, block_bytes), dtype=torch.uint8, device=blocks.device)
        self._on_gpu = blocks.device.type == "cuda"
        self._stream = torch.cuda.Stream(blocks.device) if self._on_gpu else None
        self._table = torch.empty(2 * rows, dtype=torch.int32, device=blocks.device)
        self._host_table = torch.empty(2 * rows, dtype=torch.int32, pin_memory=self._on_gpu)
        self._pinned = self._new(BLOCKS)

    def _new(self, count: int) -> torch.Tensor:
        return torch.empty((count, self.piece.shape[1]), dtype=torch.uint8, pin_memory=self._on_gpu)

    def pinned(self, count: int) -> torch.Tensor:
        """`[count, block_bytes]` of host memory, the same each time while it is enough."""
        if count > len(self._pinned):
            self._pinned = self._new(count)
        return self._pinned[:count]

    def pieces(self, blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """As many as the piece has room for, with the number of those before."""
        for first in range(0, len(blocks), len(self.piece)):
            yield first, blocks[first : first + len(self.piece)]

    def numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        """On the device, int32 `[blocks]`, until the next call; whatever uses the one before must be over."""
        self._host_table.numpy()[: len(blocks)] = blocks
        return self._table[: len(blocks)].copy_(self._host_table[: len(blocks)], non_blocking=True)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
