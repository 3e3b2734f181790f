"""A row's logits, best id and weights as `kernels/sampling.py` has them, in Triton: the passes before anything is cut.

Every function is of one row and one program, which goes over the vocabulary in tiles. Between a store and a load of the
same place by another thread stands a barrier: Triton gives threads other elements from one loop to the next.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kernels import sampling as rule
from kernels.gpu.sampling_table import word_of

LOG2_E = tl.constexpr(rule.LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(rule.LN2_HIGH), tl.constexpr(rule.LN2_LOW)
TO_WHOLE, TO_UNITS = tl.constexpr(rule.TO_WHOLE), tl.constexpr(float(rule.TO_UNITS))
BITS_OF_TO_UNITS = tl.constexpr(int(np.float64(rule.TO_UNITS).view(np.int64)))
LOWEST_EXPONENT = tl.constexpr(rule.LOWEST_EXPONENT)
S0, S1, S2, S3, S4, S5, S6, S7, S8, S9, S10, S11 = (tl.constexpr(value) for value in rule.SERIES)

REPETITION, PRESENCE = tl.constexpr(word_of("repetition")), tl.constexpr(word_of("presence"))
FREQUENCY = tl.constexpr(word_of("frequency"))
SEEN_AT, NUM_SEEN = tl.constexpr(word_of("seen_at")), tl.constexpr(word_of("num_seen"))
BIASED_AT, NUM_BIASED = tl.constexpr(word_of("biased_at")), tl.constexpr(word_of("num_biased"))
TURNS, MASK_AT = tl.constexpr(word_of("turns")), tl.constexpr(word_of("mask_at"))
BANNED_AT, NUM_BANNED = tl.constexpr(word_of("banned_at")), tl.constexpr(word_of("num_banned"))


@triton.jit
def fp32_of(words, place):
    return tl.load(words + place).to(tl.float32, bitcast=True)


@triton.jit
def best_of(row, vocab, TILE: tl.constexpr):
    """The largest logit, the lowest id that has it, and how many are NaN (which are never the largest)."""
    values = tl.full((TILE,), float("-inf"), tl.float32)
    ids = tl.arange(0, TILE)
    wrong = tl.zeros((TILE,), tl.int32)
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        wrong += (x != x).to(tl.int32)
        better = x > values
        values = tl.where(better, x, values)
        ids = tl.where(better, i, ids)
    best = tl.max(values, axis=0)
    lowest = tl.min(tl.where(values == best, ids, 0x7FFFFFFF), axis=0)
    return best, lowest, tl.sum(wrong, axis=0)


@triton.jit
def adjust(to, row, vocab, mine, words, TILE: tl.constexpr):
    """Penalties, bias and masks, into `to`. `mine`: the row of the table."""
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        tl.store(to + i, tl.load(row + i, mask=i < vocab), mask=i < vocab)
    tl.debug_barrier()
    _penalize(to, mine, words, TILE)
    tl.debug_barrier()
    _bias(to, mine, words, TILE)
    banned = words + tl.load(mine + BANNED_AT)
    num_banned = tl.load(mine + NUM_BANNED)
    for at in range(0, num_banned, TILE):
        i = at + tl.arange(0, TILE)
        ids = tl.load(banned + i, mask=i < num_banned)
        tl.store(to + ids, tl.full((TILE,), float("-inf"), tl.float32), mask=i < num_banned)
    tl.debug_barrier()
    mask_at = tl.load(mine + MASK_AT)
    if mask_at > 0:
        for at in range(0, vocab, TILE):
            i = at + tl.arange(0, TILE)
            bits = tl.load(words + mask_at + (i >> 5), mask=i < vocab, other=-1)
            forbidden = ((bits >> (i & 31)) & 1) == 0
            tl.store(to + i, tl.full((TILE,), float("-inf"), tl.float32), mask=forbidden)
        tl.debug_barrier()


@triton.jit
def _penalize(to, mine, words, TILE: tl.constexpr):
    """Its ids are distinct."""
    repetition, presence = fp32_of(mine, REPETITION), fp32_of(mine, PRESENCE)
    frequency = fp32_of(mine, FREQUENCY)
    num_seen = tl.load(mine + NUM_SEEN)
    seen = words + tl.load(mine + SEEN_AT)
    for at in range(0, num_seen, TILE):
        i = at + tl.arange(0, TILE)
        ids = tl.load(seen + i, mask=i < num_seen, other=0)
        outputs = tl.load(seen + num_seen + i, mask=i < num_seen, other=0)
        x = tl.load(to + ids, mask=i < num_seen, other=0.0)
        penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(repetition != 1.0, penalized, x)
        less = (x - frequency * outputs.to(tl.float32)) - presence
        tl.store(to + ids, tl.where(outputs > 0, less, x), mask=i < num_seen)


@triton.jit
def _bias(to, mine, words, TILE: tl.constexpr):
    """In each turn its ids are distinct."""
    num_biased, turns = tl.load(mine + NUM_BIASED), tl.load(mine + TURNS)
    biased = words + tl.load(mine + BIASED_AT)
    for turn in range(turns):
        for at in range(0, num_biased, TILE):
            i = at + tl.arange(0, TILE)
            now = tl.load(biased + 2 * num_biased + i, mask=i < num_biased, other=-1) == turn
            ids = tl.load(biased + i, mask=now, other=0)
            bias = tl.load(biased + num_biased + i, mask=now, other=0).to(tl.float32, bitcast=True)
            tl.store(to + ids, tl.load(to + ids, mask=now, other=0.0) + bias, mask=now)
        tl.debug_barrier()


@triton.jit
def _units(y):
    """float64 x - best to exp of it in units of 2^-44. Each operation is rounded once: nothing may be fused."""
    y = tl.maximum(y, LOWEST_EXPONENT)
    shifted = y * LOG2_E + TO_WHOLE
    n = shifted - TO_WHOLE
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    series = r * S0 + S1
    series = series * r + S2
    series = series * r + S3
    series = series * r + S4
    series = series * r + S5
    series = series * r + S6
    series = series * r + S7
    series = series * r + S8
    series = series * r + S9
    series = series * r + S10
    series = series * r + S11
    power = ((shifted.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)  # 2^n
    return (series * power + TO_UNITS).to(tl.int64, bitcast=True) - BITS_OF_TO_UNITS


@triton.jit
def weigh(weights, row, vocab, temperature, top, TILE: tl.constexpr):
    """All weights, `top` being the best logit over the temperature. Returns their sum, and how many are not zero."""
    sums = tl.zeros((TILE,), tl.int64)
    nonzero = tl.zeros((TILE,), tl.int64)
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        w = _units(tl.div_rn(x, temperature).to(tl.float64) - top.to(tl.float64))
        tl.store(weights + i, w, mask=i < vocab)
        sums += w
        nonzero += (w > 0).to(tl.int64)
    tl.debug_barrier()
    return tl.sum(sums, axis=0), tl.sum(nonzero, axis=0)
