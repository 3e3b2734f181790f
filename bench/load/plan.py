"""All requests of a run, made from settings and a seed: times, lengths, what is shared, who leaves. Pure.

Each of those has random numbers of its own, so that, say, another `--burstiness` leaves the lengths as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.load.arrivals import arrival_times_s
from bench.load.lengths import Span, lengths
from bench.load.records import Planned
from bench.load.traces import Trace

ARRIVALS, PROMPTS, OUTPUTS, LEAVING, IDS = range(5)
"""Streams of random numbers of one seed."""
PREFIX = -1
"""The name of the block that `--prefix-len` puts before every prompt."""


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` and `duration_s` both end a run; None is no limit."""

    rate: float
    burstiness: float
    input_len: Span
    output_len: Span
    prefix_len: int = 0
    abort_fraction: float = 0.0
    num_requests: int | None = None
    duration_s: float | None = None
    trace: Trace | None = None

    @property
    def block_tokens(self) -> int:
        """Tokens of one shared block."""
        return self.trace.block_tokens if self.trace is not None else self.prefix_len

    @property
    def closed_for_s(self) -> float | None:
        """Where all requests are due at once, their times do not end a run of `duration_s`: the clock does."""
        return self.duration_s if self.trace is None and self.rate == float("inf") else None


def stream_seed(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(2, np.uint64)[0])


def plan(load: Load, seed: int) -> Iterator[Planned]:
    """In the order of their times; without end where nothing limits it."""
    rows = _from_trace(load.trace) if load.trace is not None else _drawn(load, seed)
    for row in itertools.islice(_leaving(rows, load.abort_fraction, seed), load.num_requests):
        if load.duration_s is not None and row.due_s >= load.duration_s:
            return
        yield row


def warmups(load: Load, count: int, seed: int) -> list[Planned]:
    """Requests of the same lengths and other prompts (their indices are negative), all due at once."""
    if load.trace is not None:
        rows = [(row.prompt_tokens, row.output_tokens) for row in load.trace.rows[:count]]
    else:
        rows = list(itertools.islice(_drawn_lengths(load, seed), count))
    return [Planned(-1 - index, 0.0, prompt, output) for index, (prompt, output) in enumerate(rows)]


def _from_trace(trace: Trace) -> Iterator[Planned]:
    for index, row in enumerate(trace.rows):
        yield Planned(index, row.at_s, row.prompt_tokens, row.output_tokens, row.blocks)


def _drawn(load: Load, seed: int) -> Iterator[Planned]:
    shared = (PREFIX,) if load.prefix_len else ()
    times = arrival_times_s(load.rate, load.burstiness, stream_seed(seed, ARRIVALS))
    pairs = zip(times, _drawn_lengths(load, seed), strict=False)
    for index, (due_s, (prompt, output)) in enumerate(pairs):
        yield Planned(index, due_s, prompt + load.prefix_len, output, shared)


def _drawn_lengths(load: Load, seed: int) -> Iterator[tuple[int, int]]:
    prompts = lengths(load.input_len, stream_seed(seed, PROMPTS))
    outputs = lengths(load.output_len, stream_seed(seed, OUTPUTS))
    return zip(prompts, outputs, strict=False)


def _leaving(rows: Iterator[Planned], fraction: float, seed: int) -> Iterator[Planned]:
    """Some leave in the middle of their answer: after one chunk at least, before the last."""
    if not fraction:
        yield from rows
        return
    random = np.random.default_rng(stream_seed(seed, LEAVING))
    for row in rows:
        leaves, where = random.random(2).tolist()
        after = 1 + int(where * max(1, row.output_tokens - 1)) if leaves < fraction else None
        yield Planned(row.index, row.due_s, row.prompt_tokens, row.output_tokens, row.shared, after)
