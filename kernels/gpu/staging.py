"""What a step needs on the device: one pinned copy up, tables and the newest tokens kept up there.

A step's arrays are a few kilobytes, and each copy from unpinned memory costs more than they do: it waits for the
device. So all of them are written into one pinned buffer and go up in one asynchronous copy; on the device they are
views of one buffer that stays where it is, in places that follow from the numbers of rows and tokens alone, which is
what a CUDA graph needs. Block tables stay on the device: what joined or grew since the last step goes up, not what is.

    pinned, in turns   starts | counts | firsts | slots | token rows | positions | token ids | lasts | places | blocks
    device             the same                                                                     └ tables' changes ┘

A pinned buffer is written again only when the copy out of it is over: there are two, so that a step can be prepared
while the one before it still waits in the stream. What lies on the device is written in the stream, behind the kernels
of the step before that read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.gpu.device_step import DeviceStep

PER_ROW = 5
PER_TOKEN = 3
CHANGES = 4096
"""Of tables in one copy; more of them, where long prompts join, take more copies."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Of one step on the host, int32: `starts`, `counts`, `slots` `[rows]`, `lasts` `[sampling rows]`: the token whose
    hidden state gives logits; `token_ids` `[tokens]`: below 0, -1 - r is what row r of the step before sampled."""

    starts: np.ndarray
    counts: np.ndarray
    slots: np.ndarray
    lasts: np.ndarray
    token_ids: np.ndarray


class _Pinned:
    """Host memory that the device copies from by itself, and whether it is done."""

    def __init__(self, num_ints: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.tensor = torch.zeros(num_ints, dtype=torch.int32, pin_memory=self._on_gpu)
        self.array: np.ndarray = self.tensor.numpy()
        self._copied = torch.cuda.Event() if self._on_gpu else None

    def wait(self) -> None:
        """Until the last copy is over."""
        if self._copied is not None:
            self._copied.synchronize()

    def copying(self) -> None:
        """A copy was just put into the stream."""
        if self._copied is not None:
            self._copied.record()


class StepStaging:
    """Belongs to the thread that runs steps, and to its stream. `tables` `[slots, width]` int32 is the runner's own:
    `changed` says where it was written. A step of more than `max_step_tokens` goes up all the same, unpinned."""

    def __init__(self, tables: np.ndarray, max_step_tokens: int, device: torch.device) -> None:
        self._host_tables = tables
        num_slots, self._width = tables.shape
        self._device = device
        size = PER_ROW * num_slots + PER_TOKEN * max_step_tokens + 2 * CHANGES
        self._pinned = [_Pinned(size, device) for _ in range(2)]
        self._turn = 0
        self._buffer = self._used = torch.zeros(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros((num_slots, self._width), dtype=torch.int32, device=device)
        self._row_tables = torch.zeros((num_slots, self._width), dtype=torch.int32, device=device)
        self._changes: list[np.ndarray] = []
        self.newest_ids = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """By row of the step before: what it sampled, -1 where that was nothing."""

    def changed(self, slot: int, first: int, count: int) -> None:
        """Entries `first` and on of a slot's table are others now."""
        at = slot * self._width + first
        self._changes.append(np.arange(at, at + count, dtype=np.int32))

    def upload(self, arrays: StepArrays, rows: int) -> None:
        """Puts a step's arrays on the device, for `rows` rows: those past its own pad a graph's batch, with one token
        each, of which nothing is written and which no row samples."""
        places, blocks = self._take_changes()
        while len(places) > CHANGES:
            self._send(np.concatenate([places[:CHANGES], blocks[:CHANGES]]), 0, CHANGES)
            places, blocks = places[CHANGES:], blocks[CHANGES:]
        columns = _columns(arrays, rows)
        head = sum(map(len, columns))
        self._send(np.concatenate([*columns, places, blocks]), head, len(places))

    def _take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._changes:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        # A slot may have been joined, left and joined again: each place once, as it is now.
        places = np.unique(np.concatenate(self._changes))
        self._changes = []
        return places, self._host_tables.reshape(-1)[places]

    def _send(self, ints: np.ndarray, changes_at: int, num_changes: int) -> None:
        if len(ints) > len(self._buffer):
            self._used = torch.from_numpy(ints).to(self._device)
        else:
            pinned = self._pinned[self._turn]
            self._turn = 1 - self._turn
            pinned.wait()
            pinned.array[: len(ints)] = ints
            self._used = self._buffer
            self._used[: len(ints)].copy_(pinned.tensor[: len(ints)], non_blocking=True)
            pinned.copying()
        if num_changes:
            places, blocks = self._used[changes_at : changes_at + 2 * num_changes].view(2, -1)
            self._tables.view(-1).index_copy_(0, places.long(), blocks)

    def lasts(self, rows: int, tokens: int, count: int) -> torch.Tensor:
        """Of the step that was uploaded last, `[count]`."""
        at = 4 * rows + PER_TOKEN * tokens
        return self._used[at : at + count]

    def on_device(
        self, rows: int, tokens: int, *, max_count: int, max_end: int
    ) -> tuple[DeviceStep, torch.Tensor]:
        """The step that was uploaded last, and its token ids. Launches the gathering of its rows' tables; in a graph
        that is part of it, and depends on nothing but these numbers."""
        at, views = 0, []
        for length in (*[rows] * 4, *[tokens] * PER_TOKEN):
            views.append(self._used[at : at + length])
            at += length
        starts, counts, firsts, slots, token_rows, positions, token_ids = views
        tables = self._row_tables[:rows]
        torch.index_select(self._tables, 0, slots, out=tables)
        step = DeviceStep(tables, starts, counts, firsts, token_rows, positions, max_count, max_end)
        return step, self._with_newest(token_ids)

    def _with_newest(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Tokens that the host does not know yet are taken from the step before. Of a row that got none there (its
        logits were not finite) any id of the vocabulary will do: what comes of it is a fault."""
        newest = self.newest_ids.index_select(0, (-1 - token_ids).clamp_(min=0)).clamp_(min=0)
        return torch.where(token_ids < 0, newest, token_ids)


def _columns(arrays: StepArrays, rows: int) -> list[np.ndarray]:
    """In the order of `on_device`, with rows up to `rows` added: no tokens count, one stands there."""
    more = rows - len(arrays.starts)
    tokens = len(arrays.token_ids)
    of_rows = np.repeat(np.arange(len(arrays.counts), dtype=np.int32), arrays.counts)
    firsts = np.cumsum(arrays.counts, dtype=np.int32) - arrays.counts
    positions = np.arange(tokens, dtype=np.int32) - firsts[of_rows] + arrays.starts[of_rows]
    zeros = np.zeros(more, dtype=np.int32)
    padding_rows = np.arange(len(arrays.starts), rows, dtype=np.int32)
    padding_tokens = np.arange(tokens, tokens + more, dtype=np.int32)
    return [
        np.concatenate(parts)
        for parts in (
            (arrays.starts, zeros),
            (arrays.counts, zeros),
            (firsts, padding_tokens),
            (arrays.slots, zeros),
            (of_rows, padding_rows),
            (positions, zeros - 1),
            (arrays.token_ids, zeros),
            (arrays.lasts,),
        )
    ]
