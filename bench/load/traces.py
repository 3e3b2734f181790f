"""Reads traces of arrivals and lengths in their published formats. Pure.

    Azure 2023        TIMESTAMP,ContextTokens,GeneratedTokens           csv, stamps of 100 ns
    Mooncake          {"timestamp", "input_length", "output_length", "hash_ids"}    a JSON object a line, ms
    Mooncake, ranges  timestamp_ms,input_length,output_length,hash_id_ranges    csv, the same with "0 5-9 12" for ids

Mooncake's `hash_ids` name blocks of 512 prompt tokens: equal ids are equal tokens (and equal ids before them).
Its stamps stand on a grid of 3 s: rows of one stamp are spread evenly up to the next step of the grid, or every
third second would be a burst that no user sent.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

MOONCAKE_BLOCK_TOKENS = 512
AZURE_HEAD = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
RANGES_HEAD = ["timestamp_ms", "input_length", "output_length", "hash_id_ranges"]
QUANTISED_SHARE = 0.5
"""Of rows that share their stamp with another, above which stamps are a grid."""


class BadTrace(ValueError):
    """Says which line, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Row:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows by time, the first at 0. `block_tokens` is 0 where rows have no blocks."""

    format: str
    rows: tuple[Row, ...]
    block_tokens: int = 0
    spread_over_s: float = 0.0
    """The step of the grid over which rows of one stamp were spread, 0 where they were not."""
    left_out: int = 0
    """Rows that no answer could be had for: longer than the model's context."""


def read_trace(lines: Iterable[str]) -> Trace:
    """Raises BadTrace."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, first = next(numbered, (0, ""))
    head = [cell.strip() for cell in first.split(",")]
    if head == AZURE_HEAD:
        return _trace("Azure 2023", map(_azure_row, numbered), 0)
    if head == RANGES_HEAD:
        return _trace("Mooncake, ranges", map(_ranges_row, numbered), MOONCAKE_BLOCK_TOKENS)
    if first.lstrip().startswith("{"):
        rows = (_mooncake_row(line) for line in _with_first((number, first), numbered))
        return _trace("Mooncake", rows, MOONCAKE_BLOCK_TOKENS)
    raise BadTrace(
        f"neither Azure 2023 (csv, {','.join(AZURE_HEAD)}) nor Mooncake (a JSON object a line, or csv, "
        f"{','.join(RANGES_HEAD)})"
    )


def scaled(trace: Trace, speed: float, length_scale: float) -> Trace:
    """Arrivals `speed` times as fast; lengths, and with them shared blocks, times `length_scale`."""
    if speed == 1 and length_scale == 1:
        return trace
    rows = tuple(
        Row(
            row.at_s / speed,
            max(1, round(row.prompt_tokens * length_scale)),
            max(1, round(row.output_tokens * length_scale)),
            row.blocks,
        )
        for row in trace.rows
    )
    block_tokens = max(1, round(trace.block_tokens * length_scale)) if trace.block_tokens else 0
    return replace(trace, rows=rows, block_tokens=block_tokens, spread_over_s=trace.spread_over_s / speed)


def fitting(trace: Trace, max_model_len: int) -> Trace:
    """Without rows that are longer, prompt and answer together. Raises BadTrace where none is left."""
    rows = tuple(row for row in trace.rows if row.prompt_tokens + row.output_tokens <= max_model_len)
    if not rows:
        raise BadTrace(
            f"all rows are longer than the model's {max_model_len} tokens; try --trace-length-scale"
        )
    return replace(trace, rows=rows, left_out=len(trace.rows) - len(rows))


def _with_first(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _trace(format: str, rows: Iterable[Row], block_tokens: int) -> Trace:
    found = sorted(rows, key=lambda row: row.at_s)
    if not found:
        raise BadTrace("holds no request")
    start_s = found[0].at_s
    rebased = [replace(row, at_s=row.at_s - start_s) for row in found]
    spread, step_s = _off_the_grid(rebased)
    return Trace(format, tuple(spread), block_tokens, step_s)


def _off_the_grid(rows: list[Row]) -> tuple[list[Row], float]:
    """Rows of one stamp evenly over the least step between stamps, where most rows share theirs."""
    stamps: dict[float, list[Row]] = {}
    for row in rows:
        stamps.setdefault(row.at_s, []).append(row)
    sharing = sum(len(group) for group in stamps.values() if len(group) > 1)
    if sharing < QUANTISED_SHARE * len(rows) or len(stamps) < 2:
        return rows, 0.0
    times = list(stamps)
    step_s = min(later - earlier for earlier, later in itertools.pairwise(times))
    spread = [
        replace(row, at_s=at_s + step_s * place / len(group))
        for at_s, group in stamps.items()
        for place, row in enumerate(group)
    ]
    return spread, step_s


def _azure_row(numbered: tuple[int, str]) -> Row:
    number, line = numbered
    try:
        stamp, prompt, output = line.strip().split(",")
        whole, _, fraction = stamp.partition(".")
        at_s = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        return _row(at_s, int(prompt), int(output), ())
    except ValueError as error:
        raise BadTrace(f"line {number}: {error}") from None


def _mooncake_row(numbered: tuple[int, str]) -> Row:
    number, line = numbered
    try:
        row = json.loads(line)
        blocks = tuple(map(int, row.get("hash_ids", ())))
        return _row(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadTrace(f"line {number}: {type(error).__name__}: {error}") from None


def _ranges_row(numbered: tuple[int, str]) -> Row:
    number, line = numbered
    try:
        stamp_ms, prompt, output, ranges = next(csv.reader([line]))
        blocks: list[int] = []
        for part in ranges.split():
            low, _, high = part.partition("-")
            blocks.extend(range(int(low), int(high or low) + 1))
        return _row(float(stamp_ms) / 1000, int(prompt), int(output), tuple(blocks))
    except ValueError as error:
        raise BadTrace(f"line {number}: {error}") from None


def _row(at_s: float, prompt_tokens: int, output_tokens: int, blocks: tuple[int, ...]) -> Row:
    if prompt_tokens < 1 or output_tokens < 0 or at_s < 0:
        raise ValueError("times and lengths are not negative, and a prompt has a token")
    return Row(at_s, prompt_tokens, max(1, output_tokens), blocks)
