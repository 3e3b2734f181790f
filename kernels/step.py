"""The shape of one step: what a runner is given, what it gives back, and where each token's keys and values lie.

The `...Like` classes are structural: any object with these fields will do, so that `kernels` need not import the
folder that decides what is batched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from kernels.gpu.device_step import DeviceStep


class GrammarLike(Protocol):
    """What the answer must look like: see `kernels.grammar`."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


class SamplingLike(Protocol):
    """How one sequence's tokens are drawn. All properties, so that frozen dataclasses fit."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int:
        """0 is off."""
        ...

    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def seed(self) -> int: ...
    @property
    def child(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Banned until `min_tokens` outputs exist."""
        ...

    @property
    def logprobs(self) -> int | None:
        """None is not asked; k asks for the chosen token and the k best."""
        ...

    @property
    def prompt_logprobs(self) -> int | None:
        """The same for every prompt token but the first."""
        ...

    @property
    def grammar(self) -> GrammarLike | None: ...


class JoinedLike(Protocol):
    """A sequence that takes a slot: its tokens so far (prompt and outputs) and its block table.

    `scored` of its prompt tokens have their log-probabilities, or need none; the first one never does.
    """

    @property
    def slot(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> SamplingLike: ...
    @property
    def scored(self) -> int: ...


class BatchLike(Protocol):
    """One step: changes of slots, then rows. Applied in the order left, joined, grown, rows."""

    @property
    def joined(self) -> Sequence[JoinedLike]: ...
    @property
    def grown(self) -> Sequence[tuple[int, Sequence[int]]]: ...
    @property
    def left(self) -> Sequence[int]: ...
    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def samples(self) -> Sequence[bool]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution, and the best `(id, logprob)` pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per row of the batch: the sampled ids (none where the row does not sample) and their log-probabilities.

    `prompts` has, for rows that computed prompt tokens to be scored, the log-probabilities of those that follow.
    `faults` are rows that should have sampled or scored and could not, and why: an overflow must not become a token.
    """

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...] | None, ...]
    prompts: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


class StepLayout:
    """Where the tokens of one step lie, as arrays for the kernels.

    Row r has `counts[r]` query tokens at absolute positions `starts[r]`, `starts[r] + 1`, …; they are tokens
    `firsts[r]` and on of the step. Its blocks are `tables[slots[r]]`, of which only as many count as its positions
    need: the tables are the runner's own, so that a step costs nothing for what did not change. Per token of the
    step, made when first asked for: `positions`, `blocks` and `offsets` (int64) say where its key and value go.
    """

    def __init__(
        self,
        starts: np.ndarray,
        counts: np.ndarray,
        slots: np.ndarray,
        tables: np.ndarray,
        block_size: int,
        device: torch.device,
    ) -> None:
        """starts, counts `[rows]` int32, slots `[rows]` int64, tables `[*, width]` int32; every count at least 1."""
        assert tables.dtype == np.int32 and tables.flags.c_contiguous
        self.starts = np.ascontiguousarray(starts, dtype=np.int32)
        self.counts = np.ascontiguousarray(counts, dtype=np.int32)
        self.slots = np.ascontiguousarray(slots, dtype=np.int64)
        self.tables = tables
        ends = np.cumsum(self.counts, dtype=np.int32)
        self.firsts = ends - self.counts
        self.num_tokens = int(ends[-1])
        self._block_size = block_size
        self._device = device

    @classmethod
    def make(
        cls, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, block_size: int, device: torch.device
    ) -> StepLayout:
        """The same with one table per row, `[rows, width]`."""
        return cls(starts, counts, np.arange(len(starts)), tables, block_size, device)

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        positions = np.arange(len(rows), dtype=np.int64) - self.firsts[rows] + self.starts[rows]
        blocks = self.tables[self.slots[rows], positions // self._block_size].astype(np.int64)
        positions_there, blocks_there, offsets_there = (
            torch.from_numpy(array).to(self._device)
            for array in (positions, blocks, positions % self._block_size)
        )
        return positions_there, blocks_there, offsets_there

    @property
    def positions(self) -> torch.Tensor:
        return self._places[0]

    @property
    def blocks(self) -> torch.Tensor:
        return self._places[1]

    @property
    def offsets(self) -> torch.Tensor:
        return self._places[2]

    @cached_property
    def on_device(self) -> DeviceStep:
        """The same for kernels on the device. What keeps a step's arrays there already sets it."""
        from kernels.gpu.device_step import DeviceStep  # nothing of a GPU is imported where there is none

        rows = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
        positions = np.arange(len(rows), dtype=np.int32) - self.firsts[rows] + self.starts[rows]
        tables = self.row_tables()
        columns = (tables.ravel(), self.starts, self.counts, self.firsts, rows, positions)
        together = torch.from_numpy(np.concatenate(columns)).to(self._device)
        of_tables, starts, counts, firsts, token_rows, there = together.split(list(map(len, columns)))
        return DeviceStep(
            of_tables.view(tables.shape),
            starts,
            counts,
            firsts,
            token_rows,
            there,
            max_count=int(self.counts.max()),
            max_end=int((self.starts + self.counts).max()),
        )

    def row_tables(self) -> np.ndarray:
        """A copy `[rows, width]`, as wide as the longest row needs."""
        width = int((self.starts + self.counts).max() - 1) // self._block_size + 1
        return self.tables[self.slots, :width]
