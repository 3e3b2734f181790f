"""What top-k and top-p leave of a row, and where a number falls in it, in Triton and without a sort.

A cut is two numbers: every weight over `least` is kept, and of those that equal it the first `equals` by id. Sums of
weights are whole numbers, so "the fewest best ids that reach it" is the largest `least` from which on they do, and any
search that ends finds it. First three thresholds a pass over the vocabulary, until no more than ROOM weights are left
between the two bounds; those are copied together, and bisected where they are.
Kept sets are nested, so the cut of two rules in turn is one cut: none of them is written into the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import UNIT

OVER_BEST = tl.constexpr(UNIT + 1)


@triton.jit
def _reaching(w, least, BY_NUMBER: tl.constexpr):
    """What each weight counts for, of those from `least` on."""
    if BY_NUMBER:
        value = (w >= least).to(tl.int64)
    else:
        value = tl.where(w >= least, w, 0)
    return value


@triton.jit
def _between(low, high, quarter):
    """A threshold over `low` and under `high`, `quarter` of the way by ratio: weights lie in octaves. The bits of
    a float64 are in the order of the whole numbers that it holds."""
    a = low.to(tl.float64).to(tl.int64, bitcast=True)
    b = high.to(tl.float64).to(tl.int64, bitcast=True)
    middle = (a + ((b - a) >> 2) * quarter).to(tl.float64, bitcast=True).to(tl.int64)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _reached_from(weights, vocab, a, b, c, BY_NUMBER: tl.constexpr, TILE: tl.constexpr):
    """What the weights from each threshold on come to, and how many they are."""
    sum_a, sum_b, sum_c = (
        tl.zeros((TILE,), tl.int64),
        tl.zeros((TILE,), tl.int64),
        tl.zeros((TILE,), tl.int64),
    )
    num_a, num_b, num_c = (
        tl.zeros((TILE,), tl.int32),
        tl.zeros((TILE,), tl.int32),
        tl.zeros((TILE,), tl.int32),
    )
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < vocab, other=0)
        sum_a += _reaching(w, a, BY_NUMBER)
        sum_b += _reaching(w, b, BY_NUMBER)
        sum_c += _reaching(w, c, BY_NUMBER)
        num_a += (w >= a).to(tl.int32)
        num_b += (w >= b).to(tl.int32)
        num_c += (w >= c).to(tl.int32)
    sums = tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0), tl.sum(sum_c, axis=0)
    nums = tl.sum(num_a, axis=0), tl.sum(num_b, axis=0), tl.sum(num_c, axis=0)
    return sums[0], sums[1], sums[2], nums[0].to(tl.int64), nums[1].to(tl.int64), nums[2].to(tl.int64)


@triton.jit
def _gather(candidates, weights, vocab, low, high, TILE: tl.constexpr):
    """The weights from `low` to under `high`, one behind the other. Returns how many."""
    tl.debug_barrier()  # what was there is read
    count = tl.zeros((), tl.int32)
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < vocab, other=0)
        inside = (w >= low) & (w < high)
        places = count + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(candidates + places, w, mask=inside)
        count += tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def find_cut(
    weights,
    candidates,
    vocab,
    wanted,
    low,
    num_low,
    BY_NUMBER: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Where the fewest best ids reach `wanted`, a number of them or a weight. Those from `low` on, `num_low` of them,
    do. Returns least, equals, and what the weights over it come to."""
    high = tl.full((), OVER_BEST, tl.int64)
    above = tl.zeros((), tl.int64)
    num_high = tl.zeros((), tl.int64)
    while (high - low > 1) & (num_low - num_high > ROOM):
        a, b, c = _between(low, high, 1), _between(low, high, 2), _between(low, high, 3)
        sum_a, sum_b, sum_c, num_a, num_b, num_c = _reached_from(weights, vocab, a, b, c, BY_NUMBER, TILE)
        # From the lowest on: a threshold that reaches it is the lower bound, the first that does not the upper one.
        fails_c, fails_b, fails_a = sum_c < wanted, sum_b < wanted, sum_a < wanted
        above = tl.where(fails_a, sum_a, tl.where(fails_b, sum_b, tl.where(fails_c, sum_c, above)))
        num_high = tl.where(fails_a, num_a, tl.where(fails_b, num_b, tl.where(fails_c, num_c, num_high)))
        high = tl.where(fails_a, a, tl.where(fails_b, b, tl.where(fails_c, c, high)))
        num_low = tl.where(fails_a, num_low, tl.where(fails_b, num_a, tl.where(fails_c, num_b, num_c)))
        low = tl.where(fails_a, low, tl.where(fails_b, a, tl.where(fails_c, b, c)))
    if high - low > 1:
        count = _gather(candidates, weights, vocab, low, high, TILE)
        i = tl.arange(0, ROOM)
        w = tl.load(candidates + i, mask=i < count, other=0)
        over = above
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reached = over + tl.sum(_reaching(w, middle, BY_NUMBER), axis=0)
            enough = reached >= wanted
            low = tl.where(enough, middle, low)
            above = tl.where(enough, above, reached)
            high = tl.where(enough, high, middle)
    missing = wanted - above
    if BY_NUMBER:
        equals = missing
    else:
        equals = (missing + low - 1) // low
    return low, equals, above


@triton.jit
def weight_from(weights, vocab, least, TILE: tl.constexpr):
    """The sum of those that are no less, and their number."""
    sums = tl.zeros((TILE,), tl.int64)
    numbers = tl.zeros((TILE,), tl.int64)
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < vocab, other=0)
        sums += tl.where(w >= least, w, 0)
        numbers += (w >= least).to(tl.int64)
    return tl.sum(sums, axis=0), tl.sum(numbers, axis=0)


@triton.jit
def fall(weights, vocab, least, equals, target, TILE: tl.constexpr):
    """The first id at which the kept weights, in id order, come to more than `target`, which all of them do."""
    found = tl.full((), -1, tl.int32)
    at = tl.zeros((), tl.int32)
    reached = tl.zeros((), tl.int64)
    while (found < 0) & (at < vocab):
        i = at + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < vocab, other=0)
        same = (w == least).to(tl.int64)
        taken = tl.minimum(tl.sum(same, axis=0), equals)
        inside = tl.sum(tl.where(w > least, w, 0), axis=0) + taken * least
        if reached + inside > target:
            kept = (w > least) | ((same > 0) & (tl.cumsum(same, axis=0) <= equals))
            sums = reached + tl.cumsum(tl.where(kept, w, 0), axis=0)
            found = tl.min(tl.where(sums > target, i, 0x7FFFFFFF), axis=0)
        reached += inside
        equals -= taken
        at += TILE
    return found
