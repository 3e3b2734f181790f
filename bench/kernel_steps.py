"""Whole steps of a model, from token ids to sampled tokens: decode batches and prompt chunks, beside transformers.

The floor of a step is that of `model_costs.py`, at the measured rates; whichever of the two takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kernel_case import Case, difference
from bench.kernel_cases import BLOCK_SIZE, CPU
from bench.model_costs import step_operations, weight_bytes
from common.request import SamplingParams
from kernels.cache import dtype_name
from kernels.runner import ModelRunner, load_runner
from kernels.step import StepLayout

# Thirty layers apart: in bf16 transformers itself differs from itself by 0.17 of logits up to 30.
ALLOWED = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3}
CHUNK = 256
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    batches: Sequence[int] = (1, 8, 16, 32)
    context: int = 300
    prompts: Sequence[int] = (256, 1024)


@dataclass(frozen=True, slots=True)
class Joined:
    """`JoinedLike`."""

    slot: int
    tokens: Sequence[int]
    prompt_len: int
    blocks: Sequence[int]
    sampling: SamplingParams = GREEDY
    scored: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """`BatchLike`."""

    joined: Sequence[Joined] = ()
    grown: Sequence[tuple[int, Sequence[int]]] = ()
    left: Sequence[int] = ()
    slots: Sequence[int] = ()
    starts: Sequence[int] = ()
    counts: Sequence[int] = ()
    samples: Sequence[bool] = ()
    token_ids: Sequence[int] = field(default_factory=list)


class Steps:
    """A runner with a full batch of sequences of equal length, and the same model in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype, threads: int, sizes: StepSizes) -> None:
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()

        self._sizes = sizes
        self._dtype = dtype
        longest = max(sizes.context, *sizes.prompts)
        self._per_row = -(-longest // BLOCK_SIZE)
        rows = max(sizes.batches)
        self.runner: ModelRunner = load_runner(
            str(folder),
            dtype=dtype_name(dtype),
            device="cpu",
            block_size=BLOCK_SIZE,
            num_blocks=rows * self._per_row,
            max_num_seqs=rows,
            max_model_len=longest,
            threads=threads,
        )
        self._theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        generator = np.random.default_rng(2)
        self._tables = generator.permutation(rows * self._per_row).astype(np.int32).reshape(rows, -1)
        self._tokens = generator.integers(0, self.runner.vocab_size, (rows, longest))

    def cases(self) -> Iterator[Case]:
        context = self._sizes.context
        with torch.inference_mode():
            self._join(context)
        for count in self._sizes.batches:
            yield self._case("decode step", f"batch {count}, context {context}", range(count), context - 1, 1)
        for length in self._sizes.prompts:
            yield self._case("prompt, one step", f"{length} tokens", range(1), 0, length)

    def _join(self, context: int) -> None:
        """All sequences with their context computed, in chunks. Rows are run again and again at one position."""
        rows = range(len(self._tables))
        self.runner.run(
            Batch(
                joined=[
                    Joined(r, self._tokens[r, :context].tolist(), 1, self._tables[r].tolist()) for r in rows
                ]
            )
        )
        for row in rows:
            for start in range(0, context, CHUNK):
                self.runner.run(self._batch(range(row, row + 1), start, min(CHUNK, context - start)))

    def _batch(self, rows: range, start: int, count: int) -> Batch:
        return Batch(
            slots=list(rows),
            starts=[start] * len(rows),
            counts=[count] * len(rows),
            samples=[True] * len(rows),
            token_ids=self._tokens[rows.start : rows.stop, start : start + count].reshape(-1).tolist(),
        )

    def _case(self, kernel: str, size: str, rows: range, start: int, count: int) -> Case:
        batch = self._batch(rows, start, count)
        ids = torch.from_numpy(self._tokens[: len(rows), : start + count])
        past = self._past(ids[:, :start])

        def theirs() -> torch.Tensor:
            """Last logits. What a run adds to the past is cut off again."""
            said = self._theirs(ids[:, start:], cache=past, use_cache=True, logits_to_keep=1)
            past.crop(-count)
            logits: torch.Tensor = said.logits[:, -1].float()
            return logits

        def check() -> float:
            logits = self._logits(batch)
            tokens = [row[0] for row in self.runner.run(batch).ids]
            if tokens != logits.argmax(dim=1).tolist():
                return 1.0  # the step sampled something else than its own best
            return difference(logits, theirs())

        return Case(
            kernel=kernel,
            size=size,
            run=lambda: self.runner.run(batch),
            reference=theirs,
            check=check,
            allowed=ALLOWED[self._dtype],
            moved_bytes=_step_bytes(self.runner, len(rows), start + count),
            operations=step_operations(self.runner.model.config, len(rows), start, count),
        )

    def _past(self, ids: torch.Tensor) -> Any:
        from transformers import DynamicCache

        past = DynamicCache()
        if ids.shape[1]:
            with torch.inference_mode():
                self._theirs(ids, cache=past, use_cache=True, logits_to_keep=1)
        return past

    def _logits(self, batch: Batch) -> torch.Tensor:
        starts, counts = (np.array(column, dtype=np.int32) for column in (batch.starts, batch.counts))
        step = StepLayout.make(starts, counts, self._tables[: len(starts)], BLOCK_SIZE, CPU)
        hidden = self.runner.model.forward(torch.tensor(batch.token_ids), step, self.runner.cache)
        return self.runner.model.logits(hidden[torch.from_numpy(step.firsts + counts - 1).long()])


def _step_bytes(runner: ModelRunner, rows: int, length: int) -> int:
    per_token = runner.layout.block_bytes // BLOCK_SIZE
    return weight_bytes(runner.model.config, runner.model.dtype) + rows * length * per_token
