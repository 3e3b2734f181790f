"""What prompts and rows cost a worker by the step times that it has fitted (`common/step_times.py`). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from common.step_times import Coefficients, StepShape, chunk_for, seconds_of

CAUTION = 0.9
"""Of an ITL target is aimed at: what lies between two steps is not in the model."""
LEAST_CHUNK = 32
"""Tokens of local prefill beside a decode batch, below which a step's overhead is most of what they cost."""

BEHIND = 0.75
"""Of a step of the rows alone, when a prompt comes right after another one: measured, in virtual time."""
UNBOUND = 1 << 30


def prompt_seconds(model: Coefficients, tokens: int, budget: int) -> float:
    """Of one prompt alone, in chunks of `budget`, until its last step has ended."""
    fixed, per_row, per_context, per_chunk = model
    steps = -(-tokens // budget)
    context = budget * steps * (steps - 1) / 2
    return steps * (fixed + per_row) + per_context * context + per_chunk * tokens


def share_seconds(model: Coefficients, prompts: int, tokens: int, budget: int) -> float:
    """Of so many prompts with so many tokens together that share steps with others: each takes a part of one."""
    if not tokens:
        return 0.0
    fixed, per_row, per_context, per_chunk = model
    steps = tokens / budget
    mean = tokens / prompts
    context = tokens * max(0.0, mean / budget - 1) / 2
    return steps * fixed + (prompts + steps) * per_row + per_context * context + per_chunk * tokens


def gap_seconds(model: Coefficients, rows: int, context: int, chunk: int = 0) -> float:
    """From token to token in a batch of so many rows."""
    return seconds_of(model, StepShape(rows, context, chunk))


def rows_within(model: Coefficients, itl_s: float, context_of_one: float) -> int:
    """How many rows, each with so much context, a step may have that keeps the target. One that a row alone would miss
    too binds nobody."""
    fixed, per_row, per_context, _ = model
    of_one = per_row + per_context * context_of_one
    left_s = CAUTION * itl_s - fixed
    if left_s < of_one or of_one <= 0:
        return UNBOUND
    return int(left_s / of_one)


def local_chunk(model: Coefficients, rows: int, context: int, budget: int, itl_s: float | None) -> int:
    """Prompt tokens that a step beside a decode batch may compute; `itl_s`: the tightest target in it."""
    chunk = max(budget - rows, 1)
    if itl_s is None or not rows:
        return chunk
    fitting = chunk_for(model, StepShape(rows + 1, context, 0), CAUTION * itl_s)
    return chunk if fitting is None else min(chunk, fitting)


def left_of_chunk(joins: float) -> float:
    """How much of a step's chunk is computed on the average, where so many requests a step join that prefill workers
    computed. The first step of each is shorter by what it waited since its first token, and the one that waited longest
    counts: with Poisson arrivals 1 - 1/(n + 1) of a step, of n that came in it."""
    return -math.expm1(-joins) / joins if joins > 0 else 1.0


class Pace(Protocol):
    """How a worker computes prompts, in seconds."""

    @property
    def step_tokens(self) -> int: ...
    def alone_s(self, tokens: int) -> float:
        """Of one with nobody before it."""

    def first_s(self, tokens: int, *, behind: bool) -> float:
        """Until its first token, once its turn has come; `behind`: right after another one."""

    def taken_s(self, tokens: int) -> float:
        """What it takes of the worker's time."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of a prefill worker. Prompts that are shorter than a step share steps with those before and after them; a longer
    one is alone in its last step too, since the next is given out when it is done (`router.py`)."""

    model: Coefficients
    step_tokens: int

    def alone_s(self, tokens: int) -> float:
        return prompt_seconds(self.model, tokens, self.step_tokens)

    def first_s(self, tokens: int, *, behind: bool) -> float:
        if not behind or tokens > self.step_tokens:
            return self.alone_s(tokens)
        return self.taken_s(tokens) + share_seconds(self.model, 1, self.step_tokens, self.step_tokens) / 2

    def taken_s(self, tokens: int) -> float:
        if tokens > self.step_tokens:
            return self.alone_s(tokens)
        return share_seconds(self.model, 1, tokens, self.step_tokens)


@dataclass(frozen=True, slots=True)
class Beside:
    """Of a decode worker, beside a batch of so many `rows`, a step of which takes `row_step_s`. `step_tokens` of the
    prompt are in each step that has some; `on_average`, where others join."""

    step_tokens: int
    row_step_s: float
    token_s: float
    rows: int
    on_average: bool = False

    def alone_s(self, tokens: int) -> float:
        steps = -(-tokens // self.step_tokens)
        if self.on_average and steps > 1:
            return (tokens / self.step_tokens + 0.5) * self.row_step_s + self.token_s * tokens
        return steps * self.row_step_s + self.token_s * tokens

    def first_s(self, tokens: int, *, behind: bool) -> float:
        """A step of the rows alone is under way when it hears of it: half of one is left, more or less; most of it
        where the step before it had the end of another prompt."""
        left = 0.0 if not self.rows else BEHIND if behind else 0.5
        return self.alone_s(tokens) + left * self.row_step_s

    def taken_s(self, tokens: int) -> float:
        return self.first_s(tokens, behind=True)

    def harm_s(self, tokens: int) -> float:
        """By how much its rows are later for them, added up."""
        return self.rows * self.token_s * tokens
