"""Single stages of the sampling kernel, so that a test may see bits that an id seldom shows."""

# ruff: noqa: ANN001, ANN201 (what Triton compiles has no types of Python)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from kernels.gpu.sampling_cut import fall
from kernels.gpu.sampling_weights import adjust, weigh


@triton.jit
def weights_of(weights, sums, row, vocab, temperature, top, TILE: tl.constexpr):
    """`sums`: the total, and how many are not zero."""
    total, nonzero = weigh(weights, row, vocab, temperature, tl.load(top), TILE)
    tl.store(sums, total)
    tl.store(sums + 1, nonzero)


@triton.jit
def adjusted_row(to, row, vocab, words, TILE: tl.constexpr):
    """As the first row of a table."""
    adjust(to, row, vocab, words, words, TILE)


@triton.jit
def falls_on(ids, weights, vocab, cut, TILE: tl.constexpr):
    """`cut`: least, equals, target."""
    target = tl.load(cut + 2)
    tl.store(ids, fall(weights, vocab, tl.load(cut), tl.load(cut + 1), target, TILE))
