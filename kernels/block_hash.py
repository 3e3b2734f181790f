"""The checksum of a block that never leaves devices, as a host computes it. `kernels/gpu/block_moves.py` has the same.

    hash = sum over i of mix(word[i] + (i + 1) * GOLDEN)   modulo 2^64, word[i] the block's i-th 8 bytes, little-endian

with `mix` and `GOLDEN` those of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014). Why a sum: integers add exactly and in any order, so the number does not depend on how a device cuts a
block over its programs. No more mixing after it: that would be a bijection, and tell no two blocks apart.

Strength. `mix` is a bijection, so a change that stays within one aligned word of 8 bytes is always found. One over
several words, moved or swapped words included, is missed with probability about 2^-64 where it is blind to the hash, as
damage is. Who chooses the change can make two blocks collide: it is no proof against a peer that lies, and neither is
the XXH3 of the other channels; peers of one user are trusted not to.
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def block_hash(blocks: np.ndarray) -> np.ndarray:
    """`blocks` uint8 `[..., block_bytes]`, in one piece; int64 `[...]`.

    Raises ValueError unless 8 divides block_bytes.
    """
    block_bytes = blocks.shape[-1]
    if block_bytes % 8 or block_bytes == 0:
        raise ValueError(f"a block of {block_bytes} bytes is not made of words of 8")
    x = blocks.view("<u8") + np.arange(1, block_bytes // 8 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    x ^= x >> np.uint64(31)
    found: np.ndarray = np.atleast_1d(x.sum(axis=-1, dtype=np.uint64)).view(np.int64)
    return found.reshape(blocks.shape[:-1])
