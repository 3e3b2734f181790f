"""Logits of every kind for tests of samplers: each of them must say what the rule says."""

from __future__ import annotations

import numpy as np


def any_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Flat to steep: from weights that differ by a few of 2^44 units to one that has all. Ties, infinities, zeros of
    both signs."""
    logits = rng.standard_normal((rows, vocab)) * rng.choice([1e-6, 1e-3, 0.3, 1, 3, 10, 1e4], (rows, 1))
    for row in range(rows):
        kind = rng.integers(0, 8)
        if kind == 0:
            logits[row] = np.round(logits[row])
        elif kind == 1:
            logits[row, rng.random(vocab) < 0.9] = -np.inf
        elif kind == 2:
            logits[row, rng.integers(0, vocab)] = 80.0
        elif kind == 3:
            logits[row] = rng.choice([0.0, -0.0, 1.5], vocab)
        logits[row, rng.integers(0, vocab)] = 1.0  # never all minus infinity
    wide: np.ndarray = logits.astype(np.float32)
    return wide
