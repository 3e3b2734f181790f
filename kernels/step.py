"""The shape of one step: what a runner is given, what it gives back, and where each token's keys and values lie.

The `...Like` classes are structural: any object with these fields will do, so that `kernels` need not import the
folder that decides what is batched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch


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


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of one step lie, as arrays for the kernels.

    Row r has `counts[r]` query tokens at absolute positions `starts[r]`, `starts[r] + 1`, …; they are tokens
    `firsts[r]` and on of the step. `tables[r]` lists its blocks (int32, padded with 0). Per token of the step:
    `positions` (int64), `blocks` (int64) and `offsets` (int64) say where its own key and value are written.
    """

    starts: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    tables: np.ndarray
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def make(
        cls, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, block_size: int, device: torch.device
    ) -> "StepLayout":
        """starts, counts `[rows]`, tables `[rows, width]`, all int32; every count is at least 1."""
        firsts = np.zeros(len(counts), dtype=np.int32)
        np.cumsum(counts[:-1], out=firsts[1:])
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(rows), dtype=np.int64) - firsts[rows] + starts[rows]
        blocks = tables[rows, positions // block_size].astype(np.int64)
        return cls(
            starts=np.ascontiguousarray(starts, dtype=np.int32),
            counts=np.ascontiguousarray(counts, dtype=np.int32),
            firsts=firsts,
            tables=np.ascontiguousarray(tables, dtype=np.int32),
            positions=torch.from_numpy(positions).to(device),
            blocks=torch.from_numpy(blocks).to(device),
            offsets=torch.from_numpy(positions % block_size).to(device),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions)
