"""Drives a real `ModelRunner` as a node would: chunks, ragged batches, scattered blocks, a dirty cache."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.gpu_check.driving import Batch, Joined, Sampling
from kernels.runner import ModelRunner
from kernels.step import StepResult, TokenLogprob

SAYS_THREE = Sampling(logprobs=3)


@dataclass(slots=True)
class Sequence_:
    """One sequence while it runs: what is known, what is computed, what came out."""

    tokens: list[int]
    prompt_len: int
    wanted: int
    sampling: Sampling
    computed: int = 0
    num_blocks: int = 0
    outputs: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)


def fill_with_nan(runner: ModelRunner) -> None:
    """Blocks come back from others: whatever they hold must not matter."""
    runner.cache.tensor.fill_(float("nan"))


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    wanted: int,
    *,
    chunk: int = 512,
    sampling: Sampling | Sequence[Sampling] = SAYS_THREE,
    stagger: int = 0,
) -> list[list[tuple[int, TokenLogprob | None]]]:
    """All prompts in one ragged batch, at most `chunk` prompt tokens of each per step; blocks in random order.

    `stagger`: sequence i starts i * stagger steps later, so that chunks and decode steps mix.
    """
    fill_with_nan(runner)
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    free = list(range(runner.cache.num_blocks))
    random.Random(len(prompts) * 1000 + chunk).shuffle(free)
    sequences = [Sequence_(list(p), len(p), wanted, s) for p, s in zip(prompts, settings, strict=True)]
    step = 0
    while any(len(sequence.outputs) < wanted for sequence in sequences):
        batch = Batch()
        rows = [
            slot
            for slot, sequence in enumerate(sequences)
            if step >= slot * stagger and len(sequence.outputs) < wanted
        ]
        for slot in rows:
            _add_row(batch, slot, sequences[slot], free, runner.layout.block_size, chunk)
        _take(runner.run(batch), rows, sequences)
        step += 1
    runner.run(Batch(left=list(range(len(sequences)))))
    return [sequence.outputs for sequence in sequences]


def _add_row(
    batch: Batch, slot: int, sequence: Sequence_, free: list[int], block_size: int, chunk: int
) -> None:
    end = min(sequence.computed + chunk, len(sequence.tokens))
    missing = -(-end // block_size) - sequence.num_blocks
    blocks = [free.pop() for _ in range(missing)]
    if sequence.computed == 0:
        batch.joined.append(Joined(slot, sequence.tokens, sequence.prompt_len, blocks, sequence.sampling))
    elif blocks:
        batch.grown.append((slot, blocks))
    sequence.num_blocks += missing
    batch.add(slot, sequence.computed, sequence.tokens[sequence.computed : end], end == len(sequence.tokens))
    sequence.computed = end


def _take(result: StepResult, rows: Sequence[int], sequences: Sequence[Sequence_]) -> None:
    for slot, ids, logprobs in zip(rows, result.ids, result.logprobs, strict=True):
        if ids:
            sequences[slot].outputs.append((ids[0], None if logprobs is None else logprobs[0]))
            sequences[slot].tokens.append(ids[0])


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def full_logits(runner: ModelRunner, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    """fp32 logits `[tokens, vocab]` at every position, in chunks, straight from the model."""
    import numpy as np

    from kernels.step import StepLayout

    fill_with_nan(runner)
    block_size = runner.layout.block_size
    table = np.arange(-(-len(tokens) // block_size), dtype=np.int32)[::-1].copy()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            step = StepLayout.make(
                np.array([start], dtype=np.int32),
                np.array([len(part)], dtype=np.int32),
                table[None],
                block_size,
                runner.model.device,
            )
            ids = torch.tensor(part, device=runner.model.device)
            parts.append(runner.model.logits(runner.model.forward(ids, step, runner.cache)))
    return torch.cat(parts)
