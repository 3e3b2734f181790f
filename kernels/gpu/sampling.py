"""Sampling on the device: logits to ids for a batch in which each row has settings of its own, in Triton.

The rule is `kernels/sampling.py`, and so are the bits: weights are whole numbers from a float64 series whose every
operation is rounded once, which is why these kernels are compiled without fused multiply and add. One program has one
row; nothing in it depends on another row, on their number, or on the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.sampling_cut import fall, find_cut, weight_from
from kernels.gpu.sampling_table import ROW_WORDS, SamplingTable, word_of
from kernels.gpu.sampling_weights import adjust, best_of, fp32_of, weigh

TILE = 2048
ROOM = 2048
WARPS = 16
WORKSPACE_BYTES = 256 << 20
"""At most, whatever the number of rows: more of them are sampled in turns."""

_ROW_WORDS = tl.constexpr(ROW_WORDS)
SEED, TOP_P = tl.constexpr(word_of("seed")), tl.constexpr(word_of("top_p"))
MIN_WEIGHT, TEMPERATURE = tl.constexpr(word_of("min_weight")), tl.constexpr(word_of("temperature"))
TOP_K, OUTPUT_INDEX = tl.constexpr(word_of("top_k")), tl.constexpr(word_of("output_index"))
CHILD, DRAWS, CHANGES = (tl.constexpr(word_of(name)) for name in ("child", "draws", "changes"))


@triton.jit
def _number(mine, wide):
    """53 random bits, Philox4x32-10 by seed, output index and child: `uniforms` of kernels/philox.py before 2^-53."""
    seed = tl.load(wide + SEED).to(tl.uint64, bitcast=True)
    index, child = tl.load(mine + OUTPUT_INDEX), tl.load(mine + CHILD)
    high, low, _, _ = tl.philox(seed, index, 0, child, 0)
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11


@triton.jit
def _drawn(
    weights, candidates, row, vocab, mine, wide, temperature, top, TILE: tl.constexpr, ROOM: tl.constexpr
):
    """The id that the row's number falls on, of what top-k, top-p and min-p leave."""
    total, num_kept = weigh(weights, row, vocab, temperature, top, TILE)
    least = tl.zeros((), tl.int64)
    equals = tl.zeros((), tl.int64)
    over = total  # the sum of the weights over `least`, `num_kept` in number
    top_k = tl.load(mine + TOP_K).to(tl.int64)
    if (top_k > 0) & (top_k <= num_kept):
        one = tl.full((), 1, tl.int64)
        least, equals, _ = find_cut(weights, candidates, vocab, top_k, one, num_kept, True, TILE, ROOM)
        over, num_kept = weight_from(weights, vocab, least + 1, TILE)
        total = over + least * equals
    top_p = tl.load(wide + TOP_P).to(tl.float64, bitcast=True)
    if top_p < 1.0:
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(tl.maximum(wanted, 1), total)
        if over >= wanted:
            least, equals, over = find_cut(
                weights, candidates, vocab, wanted, least + 1, num_kept, False, TILE, ROOM
            )
        else:
            equals = (wanted - over + least - 1) // least
        total = over + least * equals
    min_weight = tl.load(wide + MIN_WEIGHT)
    if min_weight > least:
        total, num_kept = weight_from(weights, vocab, min_weight, TILE)
        least = min_weight - 1  # none of those is kept
        equals = equals * 0
    number, all_weight = _number(mine, wide), total.to(tl.uint64, bitcast=True)
    target = (tl.umulhi(number, all_weight) << 11) | ((number * all_weight) >> 53)
    return fall(weights, vocab, least, equals, target.to(tl.int64, bitcast=True), TILE)


@triton.jit(do_not_specialize=["vocab", "first"])
def _sample_kernel(
    logits,
    stride,
    vocab,
    first,
    words,
    adjusted,
    weights,
    candidates,
    out,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)  # in the workspace
    index = place + first
    row = logits + index * stride
    mine = words + index * _ROW_WORDS
    wide = words.to(tl.pointer_type(tl.int64)) + index * (_ROW_WORDS // 2)
    best, token, num_wrong = best_of(row, vocab, TILE)
    if (num_wrong > 0) | (best == float("inf")) | (best == float("-inf")):
        token = tl.full((), -1, tl.int32)
    else:
        if tl.load(mine + CHANGES) != 0:
            to = adjusted + place * vocab
            adjust(to, row, vocab, mine, words, TILE)
            best, token, num_wrong = best_of(to, vocab, TILE)
            row = to
        if tl.load(mine + DRAWS) != 0:
            temperature = fp32_of(mine, TEMPERATURE)
            top = tl.div_rn(best, temperature)
            # Else there is nothing to weigh: an overflow, or all is forbidden.
            if (top > float("-inf")) & (top < float("inf")):
                room = candidates + place * ROOM
                token = _drawn(
                    weights + place * vocab, room, row, vocab, mine, wide, temperature, top, TILE, ROOM
                )
    tl.store(out + index, token)


def rows_at_once(vocab: int) -> int:
    """How many rows the workspace has room for."""
    return max(1, WORKSPACE_BYTES // (12 * vocab + 8 * ROOM))


def sample_on_device(
    logits: torch.Tensor,
    table: SamplingTable,
    *,
    out: torch.Tensor | None = None,
    tile: int = TILE,
    room: int = ROOM,
) -> torch.Tensor:
    """logits `[rows, vocab]` fp32, each row contiguous, left unchanged; a table of as many rows and that vocabulary.
    Returns int32 `[rows]`, `out` where it is given: the row's id, or -1 where its logits are not finite (a NaN, or a
    best one that is no number). The host waits for nothing. `tile`, `room`: powers of two; no bit depends on them."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and (logits.stride(1) == 1 or vocab == 1 or not rows)
    assert (rows, vocab) == (table.num_rows, table.vocab_size)
    assert logits.device == table.words.device
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    assert out.shape == (rows,) and out.dtype == torch.int32 and out.is_contiguous()
    at_once = min(rows, rows_at_once(vocab))

    def space(dtype: torch.dtype, width: int, needed: bool) -> torch.Tensor:
        return torch.empty(at_once * width if needed else 1, dtype=dtype, device=logits.device)

    adjusted = space(torch.float32, vocab, table.any_changes)
    weights = space(torch.int64, vocab, table.any_draws)
    candidates = space(torch.int64, room, table.any_draws)
    for first in range(0, rows, at_once or 1):
        _sample_kernel[(min(at_once, rows - first),)](
            *(logits, logits.stride(0), vocab, first, table.words, adjusted, weights, candidates, out),
            TILE=tile,
            ROOM=room,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out
