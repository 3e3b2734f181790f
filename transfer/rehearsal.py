"""What this worker's steps take, measured with a few of them before it serves.

So forecasts, chunk budgets and the choice of who computes a prompt know this machine from the first request on; learnt
from requests alone that took sixteen steps of each role, which at a second a step is a quarter of a minute of load. It
also touches, outside of any request's time, what a first step touches; and a model whose step raises is told at start.

The blocks that these steps write belong to nobody yet: whoever gets one writes each place of it before it reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.batching import Batch, Joined
from common.request import SamplingParams
from common.step_times import TELLING, StepShape
from transfer.isolating import Launches

LIMIT_S = 0.5
"""No step begins after that, once as many are measured as say something. A start takes some seconds, so this is to be
little beside it."""
LONGEST_S = 10.0
"""No step begins after that in any case: where steps are so slow, requests tell what they take."""
ROWS = 16
Clock = Callable[[], float]
_DRAWN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the worker: tokens of a step, sequences, tokens of the longest sequence, blocks and tokens in one."""

    step_tokens: int
    num_seqs: int
    longest: int
    blocks: int
    block_size: int

    @property
    def chunk(self) -> int:
        """Of the largest chunk here: one more token, drawn after it, fits into a sequence and into the pool."""
        return max(1, min(self.step_tokens, self.longest - 1, self.blocks * self.block_size - 1))

    @property
    def rows(self) -> int:
        return min(self.num_seqs, ROWS)


def rehearse(
    runner: Launches,
    sizes: Sizes,
    clock: Clock = time.monotonic,
    limit_s: float = LIMIT_S,
    longest_s: float = LONGEST_S,
) -> list[tuple[StepShape, float]]:
    """Steps by their shapes, and their seconds by `clock`: of processor time where the processor computes them, since
    others start beside this worker. Raises what a step raises."""
    measured: list[tuple[StepShape, float]] = []
    joined = _joined(sizes)
    began = time.monotonic()
    for number, (rows, start, count) in enumerate(_steps(sizes)):
        batch = _batch(joined if number == 0 else [], rows, start, count)
        if time.monotonic() - began > (longest_s if len(measured) < TELLING else limit_s):
            break
        step_began = clock()
        runner.launch(batch).result()
        if number:  # the first one pays for what all later ones find
            measured.append((batch.shape, clock() - step_began))
    runner.launch(Batch(left=[one.slot for one in joined])).result()
    return measured


def _steps(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Rows, tokens before those of the step and tokens in it, of each row; the most telling ones first."""
    chunk, rows = sizes.chunk, sizes.rows
    quarter = max(1, chunk // 4)
    yield 1, 0, max(1, chunk // 16)
    yield 1, 0, quarter
    yield 1, quarter, 1
    yield rows, quarter, 1
    yield 1, 0, max(1, chunk // 2)
    yield 1, chunk - quarter, quarter
    yield max(1, rows // 2), chunk, 1
    yield rows, chunk, 1
    yield 1, 0, chunk


def _joined(sizes: Sizes) -> list[Joined]:
    """A sequence for each row, with blocks of its own as far as the pool has them."""
    each = -(-(sizes.chunk + 1) // sizes.block_size)
    return [
        Joined(
            slot=slot,
            tokens=[0] * (sizes.chunk + 1),
            prompt_len=1,
            blocks=[(slot * each + number) % sizes.blocks for number in range(each)],
            sampling=_DRAWN,
            scored=1,
        )
        for slot in range(sizes.rows)
    ]


def _batch(joined: list[Joined], rows: int, start: int, count: int) -> Batch:
    return Batch(
        joined=joined,
        slots=list(range(rows)),
        starts=[start] * rows,
        counts=[count] * rows,
        samples=[True] * rows,
        token_ids=[0] * (rows * count),
    )
