"""Whole blocks moved within or between pools on a device, and hashed on the way, in Triton. A block is opaque bytes.

A program has one tile of one block, as words of 8 bytes: it loads each once, and stores and hashes what it loaded. So
a hash that comes back with a copy is the copy's, whoever writes the source meanwhile, and a block crosses memory once.
What the hash is, and its strength: `kernels/block_hash.py`. Blocks know nothing of each other, and tiles are added as
integers, so neither the number of blocks nor the tile's size changes a bit.

Block numbers come from a device and cannot be looked at before a launch: one that is no block's is neither read nor
written, and hashed to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.block_hash import FIRST, GOLDEN, SECOND

TILE = 2048
"""Words of a program: 16 kB, so that eight blocks of 2 MB make a thousand programs."""

_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)
_NOWHERE, _ROW, _TABLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which block a row is: none, the one of its own number, the one that its list says."""


@triton.jit
def _mix(x):
    """SplitMix64's, of uint64."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


# Compiled once for all numbers of rows: a variant for each that 16 divides would be compiled amid serving.
@triton.jit(
    do_not_specialize=["sources", "targets", "rows", "cuts"], do_not_specialize_on_alignment=["tables"]
)
def _move_kernel(
    source, target, tables, sums, sources, targets, rows, cuts, words,
    FROM: tl.constexpr, TO: tl.constexpr, HASH: tl.constexpr, CHANGING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`tables` `[rows]`, or `[2, rows]` where both ends have a list. A source that is CHANGING is loaded as volatile:
    no compiler may load a word again to hash it."""
    row = (tl.program_id(0) // cuts).to(tl.int64)
    cut = tl.program_id(0) % cuts
    i = cut * TILE + tl.arange(0, TILE)
    start = row
    if FROM == _TABLE:
        start = tl.load(tables + row).to(tl.int64)
    wanted = (i < words) & (start >= 0) & (start < sources)
    end = row
    if TO == _TABLE:
        place = row
        if FROM == _TABLE:
            place = row + rows
        end = tl.load(tables + place).to(tl.int64)
    if TO != _NOWHERE:
        wanted = wanted & (end >= 0) & (end < targets)
    held = tl.load(source + start * words + i, mask=wanted, other=0, volatile=CHANGING)
    if TO != _NOWHERE:
        tl.store(target + end * words + i, held, mask=wanted)
    if HASH:
        keys = (i + 1).to(tl.uint64) * _GOLDEN
        mixed = _mix(held.to(tl.uint64, bitcast=True) + keys)
        total = tl.sum(tl.where(wanted, mixed, 0).to(tl.int64, bitcast=True), axis=0)
        tl.store(sums + tl.program_id(0), total)


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = pool[blocks[r]]. `pool` `[num_blocks, …]`, `out` `[rows, …]`, contiguous, of equally many bytes a block;
    `blocks` int32 or int64 `[rows]`. Raises ValueError where these do not fit or 8 does not divide a block's bytes."""
    _move(pool, out, blocks, from_table=True, hashed=False)


def gather_hashed(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`gather_blocks`, and the hash of each copy, int64 `[rows]`."""
    return _move(pool, out, blocks, from_table=True, hashed=True)


def scatter_blocks(staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[blocks[r]] = staging[r], as `gather_blocks`. No block may be there twice."""
    _move(staging, pool, blocks, to_table=True, hashed=False)


def scatter_hashed(staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """`scatter_blocks`, and the hash of each copy, int64 `[rows]`."""
    return _move(staging, pool, blocks, to_table=True, hashed=True)


def copy_hashed(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """target[pairs[1, r]] = source[pairs[0, r]]: from another process's pool, say, which may write it meanwhile. The
    hash of each copy, int64 `[rows]`. `pairs` int32 or int64 `[2, rows]`; no target may be there twice."""
    return _move(source, target, pairs, from_table=True, to_table=True, hashed=True, changing=True)


def hash_blocks(pool: torch.Tensor, blocks: torch.Tensor, *, tile: int = TILE) -> torch.Tensor:
    """Of pool[blocks[r]], int64 `[rows]`. Nothing is copied."""
    return _move(pool, None, blocks, from_table=True, hashed=True, tile=tile)


def _move(
    source: torch.Tensor,
    target: torch.Tensor | None,
    tables: torch.Tensor,
    *,
    from_table: bool = False,
    to_table: bool = False,
    hashed: bool,
    changing: bool = False,
    tile: int = TILE,
) -> torch.Tensor:
    from_words = _words(source)
    to_words = from_words if target is None else _words(target)
    if from_words.shape[1] != to_words.shape[1]:
        raise ValueError(f"blocks of {8 * from_words.shape[1]} bytes into blocks of {8 * to_words.shape[1]}")
    both = from_table and to_table
    if tables.dim() != 1 + both or (both and len(tables) != 2) or not tables.is_contiguous():
        raise ValueError(f"block numbers {list(tables.shape)}: [{'2, ' if both else ''}rows] wanted")
    if tables.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"block numbers are {tables.dtype}: int32 or int64 wanted")
    rows, words = tables.shape[-1], from_words.shape[1]
    if target is not None and not both and rows > len(from_words if to_table else to_words):
        raise ValueError(f"{rows} block numbers for {len(from_words if to_table else to_words)} rows")
    cuts = triton.cdiv(words, tile)
    # On the device that computes: the source may lie on another one that it reads.
    sums = torch.empty((rows, cuts) if hashed else (0,), dtype=torch.int64, device=tables.device)
    if rows:
        _move_kernel[(rows * cuts,)](
            from_words, to_words, tables, sums, len(from_words), len(to_words), rows, cuts, words,
            FROM=_TABLE if from_table else _ROW,
            TO=_NOWHERE if target is None else _TABLE if to_table else _ROW,
            HASH=hashed,
            CHANGING=changing,
            TILE=tile,
        )  # fmt: skip
    return sums.sum(-1) if hashed else sums


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """int64 `[num_blocks, words]`, the same memory."""
    if not blocks.is_contiguous() or blocks.dim() < 2:
        raise ValueError(f"blocks {list(blocks.shape)}: [num_blocks, …] in one piece wanted")
    block_bytes = blocks[0].numel() * blocks.element_size()
    if block_bytes == 0 or block_bytes % 8:
        raise ValueError(f"a block of {block_bytes} bytes is not made of words of 8")
    return blocks.view(len(blocks), -1).view(torch.int64)
