"""Copies blocks between a device's pool and this host beside the steps: a stream of their own, pinned memory between.

In the stream of the steps a copy would wait for the step that runs, and the next step for the copy; from unpinned
memory it would make the driver wait for both. What keeps the two apart is known to the host, so no event is needed: a
step is over before its blocks are read (the runner waits for its stream before it says so), and a copy into a block is
over before `write` returns, so before a step that reads it is launched.
"""

from __future__ import annotations

import contextlib
import threading

import torch


class BlockCopies:
    """`blocks` `[num_blocks, block_bytes]` uint8 on a device. From any thread; copies in one direction take turns."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        on_gpu = blocks.device.type == "cuda"
        self._up, self._down = (_Way(blocks.shape[1], blocks.device, on_gpu) for _ in range(2))

    def read(self, block: int) -> memoryview:
        """Its bytes, a copy of the caller's own."""
        way = self._down
        with way.lock:
            with way.stream():
                way.pinned.copy_(self._blocks[block], non_blocking=True)
            way.wait()
            return memoryview(way.pinned.numpy().tobytes())

    def write(self, block: int, data: memoryview) -> None:
        """`data` has as many bytes as a block."""
        way = self._up
        with way.lock:
            way.pinned.numpy()[:] = data
            with way.stream():
                self._blocks[block].copy_(way.pinned, non_blocking=True)
            way.wait()


class _Way:
    """One direction."""

    def __init__(self, block_bytes: int, device: torch.device, on_gpu: bool) -> None:
        self.lock = threading.Lock()
        self.pinned = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
