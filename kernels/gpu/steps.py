"""A runner's steps on a device: their arrays go up in one copy, decode steps run as graphs, the rest kernel by kernel.

The model's kernels read what varies from the arrays of a `DeviceStep`. For a batch of decode rows those lie in buffers
that stay where they are, and a graph replays the layers over them; the output head comes after it, for the rows that
are there. What a step draws stays on the device too: the next one may have tokens that the host does not know yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from kernels.cache import PagedCache
from kernels.device import OnGpu
from kernels.gpu.graphs import Again, Capture, CudaCapture, DecodeGraphs
from kernels.gpu.staging import StepArrays, StepStaging
from kernels.model import CausalModel
from kernels.step import StepLayout
from kernels.stream import send_up

log = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, StepLayout], torch.Tensor]
"""Token ids `[tokens]` int32 and where they lie, to hidden states `[tokens, hidden]`; writes this step's KV."""


class DeviceSteps:
    """Belongs to the thread that runs steps. `tables` `[max_num_seqs, width]` are the runner's own."""

    def __init__(
        self,
        forward: Forward,
        tables: np.ndarray,
        *,
        block_size: int,
        max_step_tokens: int,
        max_model_len: int,
        device: torch.device,
        capture: Capture | None,
    ) -> None:
        """`capture`: None runs every step kernel by kernel."""
        self._forward = forward
        self._tables = tables
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._device = device
        self._staging = StepStaging(tables, max_step_tokens, device)
        self.graphs = None if capture is None else DecodeGraphs(self._decode, len(tables), capture)

    def blocks_changed(self, slot: int, first: int, count: int) -> None:
        """Entries `first` and on of a slot's table are others now."""
        self._staging.changed(slot, first, count)

    def run(
        self, token_ids: np.ndarray, step: StepLayout, lasts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids `[tokens]`, below 0 as `sampled` says; `lasts` `[n]`: tokens whose hidden states are wanted apart.
        Returns hidden states `[tokens, hidden]` and those `[n, hidden]`, which the next step overwrites."""
        rows, tokens = len(step.starts), step.num_tokens
        arrays = StepArrays(
            step.starts, step.counts, step.slots.astype(np.int32), lasts.astype(np.int32), token_ids
        )
        size = None if self.graphs is None or tokens > rows else self.graphs.size_for(rows)
        if self.graphs is not None and size is not None:
            self._staging.upload(arrays, size)
            hidden = self.graphs.run(size)[:tokens]
            padded = size
        else:
            self._staging.upload(arrays, rows)
            ends = step.starts + step.counts
            step.on_device, ids = self._staging.on_device(
                rows, tokens, max_count=int(step.counts.max()), max_end=int(ends.max())
            )
            hidden = self._forward(ids, step)
            padded = rows
        if len(lasts) == tokens:  # each token of the step, in order
            return hidden, hidden
        return hidden, hidden.index_select(0, self._staging.lasts(padded, tokens + padded - rows, len(lasts)))

    def sampled(self, rows: np.ndarray, ids: torch.Tensor) -> None:
        """`rows` of the step that was run last drew `ids` int32 `[rows]`. Where a token id of the next step is -1 - r,
        it is what row r drew."""
        newest = self._staging.newest_ids
        if len(rows) and rows[-1] == len(rows) - 1:  # all up to there
            newest[: len(rows)].copy_(ids)
        else:
            newest.index_copy_(0, send_up(rows, self._device), ids)

    def _decode(self, rows: int) -> torch.Tensor:
        """A step of one token a row at most, over the buffers as they are: nothing here may look at what they hold.
        Its grids are those of the longest sequence; a program past its row's end leaves at once."""
        step = StepLayout(
            np.zeros(rows, dtype=np.int32),
            np.ones(rows, dtype=np.int32),
            np.arange(rows),
            self._tables,
            self._block_size,
            self._device,
        )
        step.on_device, ids = self._staging.on_device(rows, rows, max_count=1, max_end=self._max_model_len)
        return self._forward(ids, step)

    def warm_chunks(self) -> None:
        """Before serving: a chunk beside a decode row, so that no prompt waits for a compiler. What lies in block 0, to
        which all tables point, is overwritten."""
        began = time.monotonic()
        counts = np.array([2, 1], dtype=np.int32)[: len(self._tables)]
        starts = np.zeros(len(counts), dtype=np.int32)
        step = StepLayout(
            starts, counts, np.arange(len(counts)), self._tables, self._block_size, self._device
        )
        ids = np.zeros(step.num_tokens, dtype=np.int64)
        self.run(ids, step, np.arange(len(counts)))
        log.info("chunk kernels took %.1f s", time.monotonic() - began)

    def capture_all(self) -> None:
        """Before serving, over rows that all are padding; the largest first: its memory has room for the others."""
        if self.graphs is None:
            return
        began, sizes = time.monotonic(), self.graphs.sizes
        nothing = np.empty(0, dtype=np.int32)
        for done, size in enumerate(reversed(sizes), start=1):
            self._staging.upload(StepArrays(nothing, nothing, nothing, nothing, nothing), size)
            self.graphs.run(size)
            if self.graphs.broken is not None:
                return
            if done * 4 // len(sizes) > (done - 1) * 4 // len(sizes):
                log.info("CUDA graphs: %d of %d batch sizes captured", done, len(sizes))
        log.info("CUDA graphs took %.1f s", time.monotonic() - began)


def make_device_steps(
    model: CausalModel, cache: PagedCache, tables: np.ndarray, max_model_len: int, gpu: OnGpu
) -> DeviceSteps:
    """For a runner of `model` over `cache`. Where the device has no graphs (the interpreter's), their steps are run
    anew each time, over the same buffers."""
    capture: Capture = CudaCapture(model.device) if model.device.type == "cuda" else Again
    steps = DeviceSteps(
        lambda token_ids, step: model.forward(token_ids, step, cache),
        tables,
        block_size=cache.layout.block_size,
        max_step_tokens=gpu.step_tokens,
        max_model_len=max_model_len,
        device=model.device,
        capture=None if gpu.eager else capture,
    )
    if model.device.type == "cuda":
        with torch.inference_mode():
            steps.warm_chunks()
            steps.capture_all()
    return steps
