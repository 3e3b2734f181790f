"""Drives a `ModelRunner` as the two kinds of worker do: prompts in chunks here, then token after token there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.runner import ModelRunner
from kernels.step import GrammarLike, StepResult

Tables = Sequence[Sequence[int]]
"""Pool blocks of each sequence, for its prompt and all it may say."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`SamplingLike` (kernels/step.py): the server's own needs pydantic."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    child: int = 0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarLike | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """`JoinedLike`."""

    slot: int
    tokens: Sequence[int]
    prompt_len: int
    blocks: Sequence[int]
    sampling: Sampling
    scored: int = 1


@dataclass(slots=True)
class Batch:
    """`BatchLike`."""

    joined: list[Joined] = field(default_factory=list)
    grown: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, slot: int, start: int, tokens: Sequence[int], samples: bool) -> None:
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(len(tokens))
        self.samples.append(samples)
        self.token_ids.extend(tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests: prompts, how each is sampled, and how many tokens each gets."""

    prompts: Sequence[Sequence[int]]
    settings: Sequence[Sampling]
    wanted: int

    def only(self, index: int) -> Asked:
        return Asked(self.prompts[index : index + 1], self.settings[index : index + 1], self.wanted)

    def blocks_needed(self, block_size: int) -> list[int]:
        return [-(-(len(prompt) + self.wanted) // block_size) for prompt in self.prompts]

    def tables(self, block_size: int, seed: int) -> list[list[int]]:
        """Blocks in no order."""
        needed = self.blocks_needed(block_size)
        free = np.random.default_rng(seed).permutation(sum(needed)).tolist()
        cuts = np.cumsum(needed)[:-1].tolist()
        return [part.tolist() for part in np.split(np.array(free), cuts)]


def asked(lengths: Sequence[int], vocab: int, wanted: int) -> Asked:
    """Every second one greedy."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, vocab, length).tolist() for length in lengths]
    settings = [Sampling(temperature=0.8 * (place % 2), seed=place) for place in range(len(lengths))]
    return Asked(prompts, settings, wanted)


def prefill(runner: ModelRunner, asked: Asked, tables: Tables, chunk: int) -> list[int]:
    """All prompts at once, at most `chunk` tokens of each in a step; their first tokens. Raises RuntimeError where a
    row cannot be sampled."""
    slots = range(len(asked.prompts))
    batch = Batch(
        joined=[
            Joined(slot, asked.prompts[slot], len(asked.prompts[slot]), tables[slot], asked.settings[slot])
            for slot in slots
        ]
    )
    firsts: dict[int, int] = {}
    start = 0
    while len(firsts) < len(slots):
        for slot in slots:
            prompt = asked.prompts[slot]
            part = prompt[start : start + chunk]
            if part:
                batch.add(slot, start, part, start + len(part) == len(prompt))
        rows = _sampled(runner.run(batch), batch)
        firsts.update(rows)
        batch, start = Batch(), start + chunk
    runner.run(Batch(left=list(slots)))
    return [firsts[slot] for slot in slots]


def decode(runner: ModelRunner, asked: Asked, firsts: Sequence[int], tables: Tables) -> list[list[int]]:
    """All of them in one batch, from KV that lies in `tables` already. Raises RuntimeError as `prefill`."""
    slots = range(len(asked.prompts))
    tokens = [[*prompt, first] for prompt, first in zip(asked.prompts, firsts, strict=True)]
    batch = Batch(
        joined=[
            Joined(slot, tokens[slot][:], len(asked.prompts[slot]), tables[slot], asked.settings[slot])
            for slot in slots
        ]
    )
    for _ in range(asked.wanted - 1):
        for slot in slots:
            batch.add(slot, len(tokens[slot]) - 1, tokens[slot][-1:], True)
        for slot, token in _sampled(runner.run(batch), batch).items():
            tokens[slot].append(token)
        batch = Batch()
    runner.run(Batch(left=list(slots)))
    return [row[-asked.wanted :] for row in tokens]


def _sampled(result: StepResult, batch: Batch) -> dict[int, int]:
    """By slot."""
    if result.faults:
        raise RuntimeError(f"a row {next(iter(result.faults.values()))}")
    return {slot: ids[0] for slot, ids in zip(batch.slots, result.ids, strict=True) if ids}
