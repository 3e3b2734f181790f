"""Decode steps as CUDA graphs: one by batch size, captured when first met, replayed in one launch.

A decode step of an 8B model is some 300 kernels of a few microseconds each; launched one by one from Python the device
waits for the host. A graph holds all of them. It runs for the number of rows it was captured for, on the buffers it
was captured with, so batches go up to the next size and rows of no tokens pad them. Kernels are batch-invariant: those
rows change nothing, and a graph gives the bits of the same kernels launched one by one.

All graphs share one pool of memory: one runs at a time, and what one leaves is read before the next is launched.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 512
"""A larger batch computes longer than it takes to launch, and each graph takes memory of the driver's."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: 1, 2, 4, 8, then each multiple of 8 up to what holds `max_num_seqs`."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [size for size in (1, 2, 4) if size < most]
    sizes += range(8, most, 8)
    return (*sizes, most)


class Captured(Protocol):
    """A step that was captured: `replay` runs it on its buffers again; `output` is where its result lies, each time."""

    output: torch.Tensor

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class Again:
    """Captures nothing: runs the step again, into the same output. For devices without graphs."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step = step
        self.output = step().clone()

    def replay(self) -> None:
        self.output.copy_(self._step())


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaCapture:
    """Captures on the device; one memory pool for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # a handle of torch's

    def __call__(self, step: Callable[[], torch.Tensor]) -> Captured:
        """Runs it once first: kernels are compiled, and libraries make their workspaces, outside the capture. Raises
        RuntimeError where something in it cannot be captured."""
        here = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            step()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread (blocks of a transfer) may allocate or wait meanwhile without breaking it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        self._pool = graph.pool()
        return _Graph(graph, output)


class DecodeGraphs:
    """`step(rows)` runs a decode step of so many rows on fixed buffers, and depends on nothing else."""

    def __init__(self, step: Callable[[int], torch.Tensor], max_num_seqs: int, capture: Capture) -> None:
        self._step = step
        self.sizes = graph_sizes(max_num_seqs)
        self._capture = capture
        self._captured: dict[int, Captured] = {}
        self.broken: str | None = None
        """Why no step is captured any more."""

    def size_for(self, rows: int) -> int | None:
        """The rows that the buffers are to be filled for; None: such a batch runs without a graph."""
        if self.broken is not None or rows > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, rows)]

    def run(self, size: int) -> torch.Tensor:
        """The step of `size` rows on its buffers as they are. The result is overwritten by the next step's."""
        captured = self._captured.get(size)
        if captured is not None:
            captured.replay()
            return captured.output
        try:
            captured = self._capture(lambda: self._step(size))
        except RuntimeError as error:
            self.broken = str(error)
            log.warning("decode steps run without CUDA graphs, launched kernel by kernel: %s", error)
            return self._step(size)
        self._captured[size] = captured
        # What is captured is not run; the one before it was, on the same buffers, and gave its own output.
        captured.replay()
        return captured.output
