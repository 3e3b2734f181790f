"""Attention over the paged cache in Triton: decode rows with split context, chunks of any length over their past.

A program has the queries of one KV head: `rows` query rows, which are tokens times the heads that share it. Keys are
reduced in tiles at absolute positions, tiles in splits of a fixed number of keys (online softmax: Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022; split context: Flash-Decoding, Dao et al. 2023), splits merged in
their order:

    decode   a program for each (row, KV head, split) ─▶ maximum, sum, weighted values in fp32 ─▶ merged by a second one
    chunk    a program for each (few tokens, KV head) goes through its splits itself, merging with the same operations

Why a token has the same bits as a decode row and inside a chunk, whatever stands beside it. (1) Both forms call the
same function for a split, with the same tile shapes, warps and dtypes, so every product and every sum within a
tile is made by the same instructions in the same order: with 16 query rows that is mma.sync m16n8k16 on sm_80
and on sm_90 alike (wgmma takes 64). (2) A query row is one row of those tiles; rows do not mix. (3) Tiles and splits
begin at absolute positions. A tile beyond a row's own position, which stands there for the sake of later
tokens of the chunk, multiplies by exp(0) = 1 and adds zeros. (4) Merging is elementwise, and without contraction to
fused multiply-adds (`enable_fp_fusion=False`), so that two kernels cannot be contracted differently.

`fast` lets chunks have larger tiles, with wgmma on sm_90; a token's bits there still depend on its own sequence and
position alone, but are not a decode row's.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.gpu.device_step import DeviceStep
from kernels.gpu.tuning import Launch, large_tiles

LOG2_E = 1.4426950408889634
STEP_ARRAYS = ("tables", "starts", "counts", "firsts")
"""Views whose alignment varies from step to step: compiled for each, an early request would wait for a compiler."""
STEP_SIZES = ("table_width", "num_splits", "num_rows")
"""Numbers of which the same is true: 1, and divisible by 16."""

SPLIT_PROGRAMS = 16
"""Of one row and KV head at most; which of them takes a split changes no bit. A graph's grid is that of the longest
sequence: with a program for each split most would be idle (30,000 a layer at 64 rows of a model of 128k tokens)."""


@triton.jit
def _split_state(
    q, pool, table, base, first_key, last_key, q_positions, scale,
    block_stride, token_stride, dim,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `first_key` to `last_key` of one KV head: maximum `[ROWS]`, sum `[ROWS]`, weighted values `[ROWS, DIM]`.

    `base` is where the layer's K of this head begins in a block, `q_positions` `[ROWS]` the rows' positions.
    """
    d = tl.arange(0, DIM)
    n = tl.arange(0, KEYS)
    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    values = tl.zeros([ROWS, DIM], dtype=tl.float32)
    for tile in range(first_key, last_key, KEYS):
        keys = tile + n
        held = keys < last_key  # past it lies what others left, which may be NaN
        blocks = tl.load(table + keys // BLOCK, mask=held, other=0).to(tl.int64)
        at = blocks * block_stride + base + (keys % BLOCK) * dim
        wanted = held[:, None] & (d < dim)[None, :]
        k = tl.load(pool + at[:, None] + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = held[None, :] & (keys[None, :] <= q_positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet: no NaN of inf - inf
        weights = tl.exp2(scores - safe[:, None])
        kept = tl.exp2(best - safe)
        total = total * kept + tl.sum(weights, axis=1)
        v = tl.load(pool + at[:, None] + token_stride + d[None, :], mask=wanted, other=0.0)
        values = values * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = new_best
    return best, total, values


@triton.jit
def _merged(best, total, values, split_best, split_total, split_values):
    """Two neighbouring ranges of keys as one. Elementwise."""
    new_best = tl.maximum(best, split_best)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    ours, theirs = tl.exp2(best - safe), tl.exp2(split_best - safe)
    total = total * ours + split_total * theirs
    values = values * ours[:, None] + split_values * theirs[:, None]
    return new_best, total, values


@triton.jit
def _queries(
    q,
    first_token,
    num_tokens,
    kv_head,
    heads,
    dim,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """`[ROWS, DIM]`, where they lie, which tokens they are, and whether there is such a row."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    token = row // GROUP
    there = (row < (ROWS // GROUP) * GROUP) & (token < num_tokens)
    at = (first_token + token).to(tl.int64) * heads + kv_head * GROUP + row % GROUP
    return (
        tl.load(q + at[:, None] * dim + d[None, :], mask=there[:, None] & (d < dim)[None, :], other=0.0),
        at,
        token,
        there,
    )


@triton.jit(do_not_specialize_on_alignment=STEP_ARRAYS, do_not_specialize=STEP_SIZES)
def _decode_kernel(
    q, pool, partial, tables, starts, counts, firsts, scale,
    heads, dim, layer_base, part_stride, head_stride, block_stride, table_width, num_splits,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV heads, programs): of P programs, p takes splits p, p + P, … `partial`: fp32
    `[rows, heads, splits, dim + 2]`."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(starts + row)
    if tl.load(counts + row) == 1 and tl.program_id(2) * SPLIT <= position:
        first_token = tl.load(firsts + row)
        positions = tl.zeros([ROWS], dtype=tl.int32) + position
        for split in range(tl.program_id(2), position // SPLIT + 1, tl.num_programs(2)):
            queries, _at, _, there = _queries(q, first_token, 1, kv_head, heads, dim, GROUP, ROWS, DIM)
            queries = queries.to(pool.dtype.element_ty)
            last_key = tl.minimum(position + 1, (split + 1) * SPLIT)
            best, total, values = _split_state(
                queries, pool, tables + row * table_width, layer_base + kv_head * head_stride,
                split * SPLIT, last_key, positions, scale, block_stride, part_stride, dim,
                BLOCK, ROWS, KEYS, DIM, PRECISION,
            )  # fmt: skip
            d = tl.arange(0, DIM)
            head = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
            place = ((row * heads + head) * num_splits + split) * (dim + 2)
            tl.store(partial + place[:, None] + d[None, :], values, mask=there[:, None] & (d < dim)[None, :])
            tl.store(partial + place + dim, best, mask=there)
            tl.store(partial + place + dim + 1, total, mask=there)


@triton.jit(do_not_specialize_on_alignment=STEP_ARRAYS[1:], do_not_specialize=STEP_SIZES)
def _combine_kernel(
    partial, out, starts, counts, firsts, heads, dim, num_splits,
    SPLIT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): the splits of one decode row's head, in order. A row that pads a graph's batch gets zeros:
    the layers go on with it, and what memory happened to hold might be anything."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(counts + row)
    d = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    token = tl.load(firsts + row).to(tl.int64)
    target = out + (token * heads + head) * dim + one[:, None] + d[None, :]
    if count == 0:
        tl.store(target, tl.zeros([1, DIM], dtype=out.dtype.element_ty), mask=(d < dim)[None, :])
    if count == 1:
        best = tl.full([1], float("-inf"), dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        values = tl.zeros([1, DIM], dtype=tl.float32)
        for split in range(tl.load(starts + row) // SPLIT + 1):
            place = ((row * heads + head) * num_splits + split) * (dim + 2)
            theirs = tl.load(partial + place + one[:, None] + d[None, :], mask=(d < dim)[None, :], other=0.0)
            split_best = tl.load(partial + place + dim + one)
            split_total = tl.load(partial + place + dim + 1 + one)
            best, total, values = _merged(best, total, values, split_best, split_total, theirs)
        result = (values / total[:, None]).to(out.dtype.element_ty)
        tl.store(target, result, mask=(d < dim)[None, :])


@triton.jit
def _row_of_tile(firsts, num_rows, tile, TOKENS: tl.constexpr):
    """The row whose tiles of `TOKENS` tokens hold this one, by bisection: row r's begin at `firsts[r] // TOKENS + r`,
    which leaves room for all of a row's, and at most one of a row that is not used."""
    low, high = tile * 0, tile * 0 + num_rows  # tensors, in the interpreter too
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(firsts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize_on_alignment=STEP_ARRAYS, do_not_specialize=STEP_SIZES)
def _chunk_kernel(
    q, pool, out, tables, starts, counts, firsts, scale,
    heads, dim, layer_base, part_stride, head_stride, block_stride, table_width, num_rows,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens of all rows times KV heads). Rows of one token are decode rows, and not computed here. The
    last tiles of a chunk see most keys, so they begin first."""
    kv_heads = heads // GROUP
    kv_head = tl.program_id(0) % kv_heads
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    TOKENS: tl.constexpr = ROWS // GROUP
    row = _row_of_tile(firsts, num_rows, tile, TOKENS).to(tl.int64)
    count = tl.load(counts + row)
    before = (tile - row.to(tl.int32) - tl.load(firsts + row) // TOKENS) * TOKENS  # tokens of the chunk
    if count > 1 and before < count:
        left = tl.minimum(count - before, TOKENS)
        start = tl.load(starts + row) + before
        queries, at, token, there = _queries(
            q, tl.load(firsts + row) + before, left, kv_head, heads, dim, GROUP, ROWS, DIM
        )
        queries = queries.to(pool.dtype.element_ty)
        positions = start + token
        end = start + left
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        values = tl.zeros([ROWS, DIM], dtype=tl.float32)
        for first_key in range(0, end, SPLIT):
            split_best, split_total, split_values = _split_state(
                queries, pool, tables + row * table_width, layer_base + kv_head * head_stride,
                first_key, tl.minimum(end, first_key + SPLIT), positions, scale, block_stride, part_stride, dim,
                BLOCK, ROWS, KEYS, DIM, PRECISION,
            )  # fmt: skip
            best, total, values = _merged(best, total, values, split_best, split_total, split_values)
        d = tl.arange(0, DIM)
        result = (values / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * dim + d[None, :], result, mask=there[:, None] & (d < dim)[None, :])


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    step: DeviceStep,
    launch: Launch,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """Attention of a step's tokens to their own sequences' keys, from position 0 to their own.

    q `[tokens, heads, dim]`, contiguous; pool `[blocks, layers, 2, kv_heads, block_size, dim]` (a token-major cache)
    in fp32, fp16 or bf16; scale: 1 / sqrt(dim) where None. Returns `[tokens, heads, dim]` in the pool's dtype, of
    which tokens that pad a graph's batch are zero. Products add up in fp32; q is rounded to the pool's dtype.
    """
    tokens, heads, dim = q.shape
    _, _, two, kv_heads, block_size, pool_dim = pool.shape
    assert two == 2 and pool_dim == dim and heads % kv_heads == 0 and tokens == step.num_tokens
    assert q.is_contiguous() and pool.is_contiguous() and 0 <= layer < pool.shape[1]
    group = heads // kv_heads
    if out is None:
        out = torch.empty(q.shape, dtype=pool.dtype, device=q.device)
    rows = max(launch.rows, triton.next_power_of_2(group))
    factor = (dim**-0.5 if scale is None else scale) * LOG2_E  # exponentials are of base 2
    strides = (layer * pool.stride(1), pool.stride(2), pool.stride(3), pool.stride(0), step.tables.stride(0))
    constants = {
        "BLOCK": block_size,
        "GROUP": group,
        "KEYS": launch.keys,
        "SPLIT": launch.split,
        "DIM": max(16, triton.next_power_of_2(dim)),
        "PRECISION": "ieee",
        "num_stages": launch.stages,
        "enable_fp_fusion": False,
    }
    arrays = (step.tables, step.starts, step.counts, step.firsts)
    if step.max_count == 1 or step.num_rows > 1:  # some row may be one token
        _decode(
            q,
            pool,
            out,
            arrays,
            step,
            factor,
            strides,
            {**constants, "ROWS": rows, "num_warps": launch.warps},
        )
    if step.max_count > 1:
        chosen = large_tiles(launch) if fast else launch
        rows = max(chosen.rows, rows)
        # Not rows times the longest chunk: one long chunk beside many decode rows would make a million idle programs.
        grid = (kv_heads * (step.num_tokens // (rows // group) + step.num_rows),)
        _chunk_kernel[grid](
            q,
            pool,
            out,
            *arrays,
            factor,
            heads,
            dim,
            *strides,
            step.num_rows,
            **constants,
            ROWS=rows,
            num_warps=chosen.warps,
        )
    return out


def _decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    out: torch.Tensor,
    arrays: tuple[torch.Tensor, ...],
    step: DeviceStep,
    factor: float,
    strides: tuple[int, ...],
    constants: dict[str, object],
) -> None:
    """Rows of one token. What a step keeps of its splits is the allocator's for this call: in a graph, the graph's."""
    _, heads, dim = q.shape
    split, width = constants["SPLIT"], constants["DIM"]
    assert isinstance(split, int)
    num_splits = math.ceil(step.max_end / split)
    partial = torch.empty((step.num_rows, heads, num_splits, dim + 2), dtype=torch.float32, device=q.device)
    grid = (step.num_rows, pool.shape[3], min(num_splits, SPLIT_PROGRAMS))
    _decode_kernel[grid](q, pool, partial, *arrays, factor, heads, dim, *strides, num_splits, **constants)
    _combine_kernel[(step.num_rows, heads)](
        partial, out, *arrays[1:], heads, dim, num_splits, SPLIT=split, DIM=width, enable_fp_fusion=False
    )
