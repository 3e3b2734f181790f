"""Paged attention on the device: against float64 over ragged rows, bits alone and together, and its speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bench.gpu_check.errors import row_error
from bench.gpu_check.findings import Check, Speed
from bench.gpu_check.places import Heads, Place, Rows
from bench.gpu_check.roofs import Roofs
from kernels.gpu.attention import paged_attention
from kernels.gpu.device_step import DeviceStep
from kernels.gpu.tuning import Launch
from kernels.model_config import ModelConfig
from kernels.step import StepLayout

PART = "attention"
LAYER, LAYERS = 1, 2
# Of a row's root mean square, in steps of the dtype. A weight is rounded to it before it meets its value and the result
# once more: half a step each, of elements up to five times the mean. fp32 has its own sums to round, of many keys.
STEPS_ALLOWED = {torch.bfloat16: 6.0, torch.float16: 6.0, torch.float32: 64.0}


class Paged:
    """Rows with keys and values of their own, in a pool whose other numbers are NaN."""

    def __init__(self, place: Place, heads: Heads, rows: Rows) -> None:
        self.place, self.heads, self.rows = place, heads, rows
        self.tables = scattered_tables([start + count for start, count in rows], heads.block_size)
        num_blocks = int(self.tables.max()) + 1
        shape = (num_blocks, LAYERS, 2, heads.kv_heads, heads.block_size, heads.dim)
        self.pool = torch.full(shape, math.nan, dtype=place.dtype, device=place.device)
        self.keys, self.values, self.queries = [], [], []
        for row, (start, count) in enumerate(rows):
            end = start + count
            k, v = place.random(2, end, heads.kv_heads, heads.dim, seed=3 * row)
            positions = torch.arange(end, device=place.device)
            table = torch.from_numpy(self.tables[row]).to(place.device).long()
            blocks, offsets = table[positions // heads.block_size], positions % heads.block_size
            for part, held in enumerate((k, v)):
                self.pool[:, LAYER, part][blocks, :, offsets] = held
            self.keys.append(k)
            self.values.append(v)
            # Twice as far from zero: weights are then less alike, and a key left out shows.
            q = 2 * place.random(count, heads.heads, heads.dim, seed=3 * row + 1)
            self.queries.append(q.to(place.dtype).float())

    def run(
        self, launch: Launch, rows: Sequence[int] | None = None, *, fast: bool = False
    ) -> list[torch.Tensor]:
        """Outputs of these rows, computed together."""
        chosen = list(range(len(self.rows))) if rows is None else list(rows)
        queries = [self.queries[row] for row in chosen]
        step = step_of([self.rows[row] for row in chosen], self.tables[chosen], self.heads, self.place)
        return self._attend(torch.cat(queries), step, launch, fast)

    def as_decode_row(self, launch: Launch, row: int, index: int) -> torch.Tensor:
        """Of one token of a chunk, computed as a decode row."""
        start = self.rows[row][0] + index
        step = step_of([(start, 1)], self.tables[[row]], self.heads, self.place)
        (out,) = self._attend(self.queries[row][index : index + 1].contiguous(), step, launch, False)
        return out[0]

    def _attend(self, q: torch.Tensor, step: DeviceStep, launch: Launch, fast: bool) -> list[torch.Tensor]:
        out = torch.full(q.shape, math.nan, dtype=self.place.dtype, device=q.device)
        paged_attention(q, self.pool, LAYER, step, launch, out=out, fast=fast)
        return list(out.split(step.counts.tolist()))

    def reference(self, row: int) -> torch.Tensor:
        """`[count, heads, dim]` float64, by the definition."""
        start, count = self.rows[row]
        q, k, v = (tensors[row].double() for tensors in (self.queries, self.keys, self.values))
        ratio = self.heads.heads // self.heads.kv_heads
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.heads.dim)
        places = torch.arange(start + count, device=q.device)
        later = places[None, :] > places[start:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)


def scattered_tables(ends: Sequence[int], block_size: int) -> np.ndarray:
    """`[rows, width]` in no order, no block twice; past each row's end block 0, which is another's or nobody's."""
    needed = [-(-end // block_size) for end in ends]
    free = 1 + np.random.default_rng(0).permutation(sum(needed) + 2).astype(np.int32)
    tables = np.zeros((len(ends), max(needed)), dtype=np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    return tables


def step_of(rows: Rows, tables: np.ndarray, heads: Heads, place: Place) -> DeviceStep:
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    made = StepLayout.make(starts, counts, np.ascontiguousarray(tables), heads.block_size, place.device)
    return made.on_device


def checks(place: Place, launch: Launch | None = None) -> Iterator[Check]:
    for heads in place.attention:
        chosen = launch or place.launch(heads.dim)
        case = Paged(place, heads, place.checked)
        name = f"{heads.heads}/{heads.kv_heads} heads of {heads.dim}, blocks of {heads.block_size}"
        allowed = STEPS_ALLOWED[place.dtype] * place.eps
        wanted = [case.reference(row) for row in range(len(case.rows))]
        for fast in (False, True):
            together = case.run(chosen, fast=fast)
            errors = {True: [0.0], False: [0.0]}
            for (_, count), found, right in zip(case.rows, together, wanted, strict=True):
                errors[count == 1].append(row_error(found, right))
            form = "chunks, fast" if fast else "chunks"
            if not fast:
                yield Check(PART, f"decode, {name}: error over a row's mean", largest(errors[True]), allowed)
            yield Check(PART, f"{form}, {name}: error over a row's mean", largest(errors[False]), allowed)
            others = sum(
                not torch.equal(case.run(chosen, [row], fast=fast)[0], together[row])
                for row in range(len(case.rows))
            )
            yield Check(PART, f"{form}, {name}: rows that have other bits alone", others, 0)
        yield Check(
            PART, f"{name}: tokens of chunks that have other bits as decode rows", _others(case, chosen), 0
        )
        yield Check(
            PART, f"{name}: numbers of rows that pad a graph and are not zero", _padding(case, chosen), 0
        )


def largest(errors: Sequence[float]) -> float:
    """NaN where one is: `max` would lose it."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _others(case: Paged, launch: Launch) -> int:
    """In the interpreter only those that begin a tile, as a decode row does: numpy's products give the rows of one
    matrix other bits by their place in it. On a GPU any."""
    per_tile = launch.rows * case.heads.kv_heads // case.heads.heads
    found = case.run(launch)
    count = 0
    for row, (_, tokens) in enumerate(case.rows):
        some = {0, 1, tokens // 2, tokens - 1} if case.place.on_gpu else range(0, tokens, per_tile)
        for index in some if tokens > 1 else ():
            count += not torch.equal(case.as_decode_row(launch, row, index), found[row][index])
    return count


def _padding(case: Paged, launch: Launch) -> int:
    """Two decode rows, of which the second stands for none."""
    rows = [row for row, (_, count) in enumerate(case.rows) if count == 1][:2]
    step = step_of([case.rows[row] for row in rows], case.tables[rows], case.heads, case.place)
    step.counts[1] = 0
    step.positions[1] = -1
    q = torch.cat([case.queries[row] for row in rows])
    out = torch.full(q.shape, math.nan, dtype=case.place.dtype, device=q.device)
    paged_attention(q, case.pool, LAYER, step, launch, out=out)
    return int((out[1] != 0).sum()) + int(not torch.equal(out[0], case.run(launch, rows[:1])[0][0]))


# ---------------------------------------------------------------- speed


class Timed:
    """One layer's attention of a step, over a pool as a model's: blocks scattered, other layers between."""

    def __init__(self, place: Place, config: ModelConfig, rows: Rows, block_size: int) -> None:
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, block_size)
        tables = scattered_tables([start + count for start, count in rows], block_size)
        shape = (int(tables.max()) + 1, LAYERS, 2, heads.kv_heads, block_size, heads.dim)
        self._pool = torch.empty(shape, dtype=place.dtype, device=place.device).normal_()
        self._step = step_of(rows, tables, heads, place)
        self._q = place.random(self._step.num_tokens, heads.heads, heads.dim, dtype=torch.float32)
        self._out = torch.empty(self._q.shape, dtype=place.dtype, device=place.device)
        per_token = 2 * heads.kv_heads * heads.dim * place.dtype.itemsize
        q_bytes = self._q.numel() * (4 + place.dtype.itemsize)
        self.moved_bytes = sum(start + count for start, count in rows) * per_token + q_bytes
        seen = sum(count * start + count * (count + 1) // 2 for start, count in rows)
        self.operations = 4 * seen * heads.heads * heads.dim

    def seconds(self, place: Place, launch: Launch, *, fast: bool = False) -> float:
        def call() -> object:
            return paged_attention(self._q, self._pool, LAYER, self._step, launch, out=self._out, fast=fast)

        return place.clock.device_s(call)


def speeds(place: Place, roofs: Roofs) -> Iterator[Speed]:
    launch = place.launch(place.shape.head_dim)
    for rows in place.decode:
        timed = Timed(place, place.shape, rows, 16)
        yield roofs.speed(
            PART,
            f"decode, {len(rows)} × {rows[0][0] + 1} tokens",
            timed.seconds(place, launch),
            moved_bytes=timed.moved_bytes,
            target=0.8,
        )
    for rows in place.chunks:
        timed = Timed(place, place.shape, rows, 16)
        start, count = rows[0]
        invariant_s, fast_s = (timed.seconds(place, launch, fast=fast) for fast in (False, True))
        for form, taken_s, target, note in (
            ("chunk", invariant_s, 0.5, ""),
            ("chunk, fast", fast_s, 0.5, f"{invariant_s / fast_s:.2f} times as fast as the invariant form"),
        ):
            yield roofs.speed(
                PART,
                f"{form}, {count} tokens on {start}",
                taken_s,
                moved_bytes=timed.moved_bytes,
                operations=timed.operations,
                roof="matrix",
                target=target,
                note=note,
            )
