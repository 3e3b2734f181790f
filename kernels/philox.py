"""Philox4x32-10, a counter-based random generator: the number depends on key and counter alone. Pure.

From "Parallel random numbers: as easy as 1, 2, 3" (Salmon, Moraes, Dror, Shaw; SC 2011). Chosen because a draw needs
no state that would have to travel with a request: its seed and the token's index are enough on any worker.
"""

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = np.ndarray  # uint64 holding 32-bit words


def philox4x32(counter: Words, key: Words) -> Words:
    """counter `[..., 4]` and key `[..., 2]` of 32-bit words (as uint64) to four random words each."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(seeds: list[int], output_indices: list[int], children: list[int], draw: int = 0) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits per entry. Counter = (output index, draw, child, 0)."""
    size = len(seeds)
    key = np.empty((size, 2), dtype=np.uint64)
    counter = np.zeros((size, 4), dtype=np.uint64)
    for row, (seed, index, child) in enumerate(zip(seeds, output_indices, children, strict=True)):
        key[row] = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        counter[row] = index & 0xFFFFFFFF, draw, child & 0xFFFFFFFF, 0
    words = philox4x32(counter, key)
    bits = (words[:, 0] << _SHIFT | words[:, 1]) >> np.uint64(11)
    numbers: np.ndarray = bits.astype(np.float64) * 2.0**-53
    return numbers
