"""When requests come: gaps drawn from a seed. Pure.

`--burstiness` is vLLM's: gaps are gamma with that shape and mean 1/rate, so their coefficient of variation is
1/√burstiness. 1 is a Poisson process, below 1 comes in bursts, above 1 is nearly a metronome. Times are not scaled
afterwards to hit the mean exactly, as vLLM does: a run of 100 Poisson arrivals is off by 10 % now and then, and the
report gives both the rate asked for and the one that came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

DRAWN_AT_ONCE = 256


def arrival_times_s(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Without end; all 0 where the rate is infinite."""
    if math.isinf(rate):
        while True:
            yield 0.0
    random = np.random.default_rng(seed)
    now_s = 0.0
    while True:
        for gap_s in random.gamma(burstiness, 1 / (rate * burstiness), DRAWN_AT_ONCE).tolist():
            now_s += gap_s
            yield now_s
