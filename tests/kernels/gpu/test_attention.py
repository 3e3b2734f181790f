"""Attention in Triton against float64: ratios, head sizes, block sizes, ragged lengths, edges of blocks, tiles, splits.

What no row owns is NaN here, outputs too: whatever is read or left out that should not be shows.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.gpu import attention, tuning
from kernels.gpu.attention import paged_attention
from kernels.gpu.tuning import Launch, attention_launch, read_tuning
from tests.kernels.gpu.grid import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    RATIOS,
    WHOLE,
    device_step,
    scattered_tables,
)

SMALL = Launch(rows=16, keys=16, split=32, warps=4, stages=1)  # edges come early, and the interpreter is slow
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3}
LAYER, LAYERS = 1, 2
KV_HEADS = 2


class Case:
    """Rows of (start, count) with keys and values of their own, in a pool whose other numbers are NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        ratio: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.dtype, self.dim = rows, dtype, dim
        ends = [start + count for start, count in rows]
        num_blocks = sum(-(-end // block_size) for end in ends) + 3
        self.tables = scattered_tables(ends, block_size, num_blocks, seed)
        self.pool = torch.full((num_blocks, LAYERS, 2, KV_HEADS, block_size, dim), math.nan, dtype=dtype)
        self.keys, self.values, self.queries = [], [], []
        for row, end in enumerate(ends):
            k, v = torch.randn((2, end, KV_HEADS, dim), generator=generator).to(dtype)
            for position in range(end):
                block = int(self.tables[row, position // block_size])
                self.pool[block, LAYER, 0, :, position % block_size] = k[position]
                self.pool[block, LAYER, 1, :, position % block_size] = v[position]
            self.keys.append(k)
            self.values.append(v)
            self.queries.append(
                torch.randn((rows[row][1], KV_HEADS * ratio, dim), generator=generator).to(dtype).float()
            )

    def run(
        self, rows: list[int] | None = None, *, fast: bool = False, launch: Launch = SMALL
    ) -> list[torch.Tensor]:
        """Outputs of these rows, computed together."""
        chosen = list(range(len(self.rows))) if rows is None else rows
        starts, counts = zip(*(self.rows[row] for row in chosen), strict=True)
        q = torch.cat([self.queries[row] for row in chosen])
        step = device_step(list(starts), list(counts), self.tables[chosen])
        out = torch.full(q.shape, math.nan, dtype=self.dtype)
        paged_attention(q, self.pool, LAYER, step, launch, out=out, fast=fast)
        return list(out.split(list(counts)))

    def reference(self, row: int) -> torch.Tensor:
        """`[count, heads, dim]` float64, by the definition."""
        start, count = self.rows[row]
        k, v, q = self.keys[row].double(), self.values[row].double(), self.queries[row].double()
        ratio = q.shape[1] // KV_HEADS
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.dim)
        later = torch.arange(start + count)[None, :] > torch.arange(start, start + count)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)


def cases() -> list[tuple[int, int, int, torch.dtype]]:
    every = list(itertools.product(RATIOS, HEAD_DIMS, BLOCK_SIZES, DTYPES))
    if WHOLE:
        return every
    cycles = zip(
        itertools.cycle(HEAD_DIMS), itertools.cycle(BLOCK_SIZES), itertools.cycle(DTYPES), strict=False
    )
    return [(ratio, *rest) for ratio, rest in zip(RATIOS, cycles, strict=False)]


@pytest.mark.parametrize(("ratio", "dim", "block_size", "dtype"), cases())
def test_ragged_rows_equal_float64(ratio: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    rows = [(0, 1), (15, 1), (31, 3), (32, 1), (5, 12), (63, 1)]
    case = Case(rows, ratio, dim, block_size, dtype)
    for row, out in enumerate(case.run()):
        error = (out.double() - case.reference(row)).abs().max()
        assert error < ERROR[dtype], (rows[row], float(error))


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 299) if not WHOLE else range(1, 301)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_as_decode_row_and_as_end_of_a_chunk(length: int) -> None:
    """And one bit for one bit the same in both forms."""
    case = Case([(length - 1, 1)], 3, 64, 16, torch.float32, seed=length)
    (decode,) = case.run()
    assert (decode.double() - case.reference(0)).abs().max() < ERROR[torch.float32]
    count = min(length, 7)
    if count > 1:
        chunk = Case([(length - count, count)], 3, 64, 16, torch.float32, seed=length)
        chunk.pool, chunk.tables = case.pool, case.tables
        chunk.queries[0][-1] = case.queries[0][0]
        (out,) = chunk.run()
        assert torch.equal(out[-1], decode[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_alone_in_a_batch_and_in_any_place(dtype: torch.dtype) -> None:
    rows = [(40, 1), (0, 9), (70, 1), (33, 4)]
    case = Case(rows, 2, 64, 16, dtype)
    together = case.run()
    for row in range(len(rows)):
        (alone,) = case.run([row])
        assert torch.equal(alone, together[row])
    for row, out in zip((3, 1, 0), case.run([3, 1, 0]), strict=True):
        assert torch.equal(out, together[row])


def test_a_chunk_cut_elsewhere_has_the_same_bits() -> None:
    whole = Case([(20, 30)], 4, 64, 16, torch.float32)
    (together,) = whole.run()
    for cut in (1, 3, 4, 13, 29):
        parts = Case([(20, cut), (20 + cut, 30 - cut)], 4, 64, 16, torch.float32)
        parts.pool, parts.tables = whole.pool, np.repeat(whole.tables, 2, axis=0)
        parts.queries = list(whole.queries[0].split([cut, 30 - cut]))
        assert torch.equal(torch.cat(parts.run()), together), cut


def test_large_tiles_for_chunks_are_as_right_and_as_invariant() -> None:
    rows = [(40, 1), (10, 40), (0, 9)]
    case = Case(rows, 2, 64, 16, torch.float32)
    together = case.run(fast=True)
    for row, out in enumerate(together):
        assert (out.double() - case.reference(row)).abs().max() < ERROR[torch.float32]
    (alone,) = case.run([1], fast=True)
    assert torch.equal(alone, together[1])
    assert torch.equal(together[0], case.run([0])[0])  # decode rows are the same


def test_rows_that_pad_a_graphs_batch_are_zero() -> None:
    case = Case([(40, 1), (3, 1)], 2, 64, 16, torch.float32)
    step = device_step([40, 3], [1, 1], case.tables)
    step.counts[1] = 0
    step.positions[1] = -1
    out = torch.full((2, 4, 64), math.nan)
    paged_attention(torch.cat(case.queries), case.pool, LAYER, step, SMALL, out=out)
    assert torch.equal(out[0], case.run()[0][0])
    assert not out[1].any()


def test_a_grid_for_longer_rows_than_there_are_changes_nothing() -> None:
    """A graph's is that of the longest sequence."""
    case = Case([(40, 1), (3, 1)], 2, 64, 16, torch.float32)
    step = device_step([40, 3], [1, 1], case.tables)
    longer = type(step)(
        step.tables, step.starts, step.counts, step.firsts, step.token_rows, step.positions, 1, 500
    )
    out = torch.full((2, 4, 64), math.nan)
    paged_attention(torch.cat(case.queries), case.pool, LAYER, longer, SMALL, out=out)
    assert torch.equal(out, torch.cat(case.run()))


@pytest.mark.parametrize(
    "bad", [{"keys": 24}, {"rows": 8}, {"split": 16, "keys": 32}, {"warps": 0}, {"rows": 16.0}]
)
def test_a_launch_that_cannot_be_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"=|multiple"):
        Launch(**bad)


def test_a_tuning_file_is_taken_or_named(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text('{"attention": {"keys": 32, "stages": 3}}')
    assert read_tuning(path) == {"attention": {"keys": 32, "stages": 3}}
    for text, word in (
        ('{"attention": {"keys": 24}}', "power of two"),
        ('{"attention": {"kees": 32}}', "kees"),
        ('{"atention": {"keys": 32}}', "atention"),
        ("[]", "table"),
        ("{", "JSON|Expecting"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=word):
            read_tuning(path)


def test_splits_grow_with_the_longest_sequence_alone() -> None:
    cpu = torch.device("cpu")
    assert attention_launch(128, torch.bfloat16, 8192, cpu).split == 512
    assert attention_launch(128, torch.bfloat16, 131072, cpu).split == 2048
    assert attention_launch(256, torch.float32, 100, cpu).keys == 32


def test_what_was_measured_is_not_taken_for_wider_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles would not fit into shared memory, and nothing would run."""
    monkeypatch.setattr(tuning, "measured", lambda device: {"attention": {"keys": 128, "stages": 3}})
    cpu = torch.device("cpu")
    assert attention_launch(128, torch.bfloat16, 8192, cpu) == Launch(keys=128, stages=3)
    assert attention_launch(64, torch.float32, 8192, cpu) == Launch(keys=128, stages=3)
    assert attention_launch(256, torch.bfloat16, 8192, cpu) == Launch(keys=32)


def test_who_takes_a_split_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(3, 1), (159, 1), (96, 1)], 2, 64, 16, torch.float32)
    together = case.run()  # a program for each of five splits
    for programs in (1, 3):
        monkeypatch.setattr(attention, "SPLIT_PROGRAMS", programs)
        for row, out in enumerate(case.run()):
            assert torch.equal(out, together[row])
            assert (out.double() - case.reference(row)).abs().max() < ERROR[torch.float32]
