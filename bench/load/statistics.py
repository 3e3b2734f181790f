"""Percentiles and how far to trust them. Pure.

Percentiles are numpy's, with linear interpolation. Their 95 % intervals are by bootstrap over *requests*, not over
samples: the gaps of one request are alike, and counting them as independent would make intervals far too narrow.
Shares have Wilson's score interval, which holds near 0 and 1 and for few requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RESAMPLES = 400
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: float
    p50: Interval
    p95: Interval
    p99: Interval
    max: float


def wilson(hits: int, of: int) -> Interval:
    """The score interval of a share."""
    if of == 0:
        return Interval(0.0, 0.0, 1.0)
    share = hits / of
    z2 = Z_95 * Z_95
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z_95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(share, min(low, share), max(high, share))  # at 0 and 1 the sums are off by a last bit


def distribution(samples: Sequence[Sequence[float]], seed: int) -> Distribution | None:
    """Of all samples together; `samples` has those of one request in one place. None where there is none."""
    owners = np.repeat(np.arange(len(samples)), [len(of) for of in samples])
    values = np.concatenate([np.asarray(of, np.float64) for of in samples]) if len(samples) else np.empty(0)
    if not len(values):
        return None
    points = np.quantile(values, list(QUANTILES.values()))
    lows, highs = _bootstrap(values, owners, len(samples), seed)
    p50, p95, p99 = (
        Interval(float(p), float(lo), float(hi)) for p, lo, hi in zip(points, lows, highs, strict=True)
    )
    return Distribution(len(values), float(values.mean()), p50, p95, p99, float(values.max()))


def _bootstrap(
    values: NDArray[np.float64], owners: NDArray[np.int64], num_requests: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds for each of QUANTILES. A resample is a weight for each request: how often it was drawn."""
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    random = np.random.default_rng(seed)
    quantiles = np.array(list(QUANTILES.values()))
    found = np.empty((RESAMPLES, len(quantiles)))
    for resample in range(RESAMPLES):
        weights = np.bincount(random.integers(0, num_requests, num_requests), minlength=num_requests)
        below = np.cumsum(weights[owners])
        if below[-1] == 0:  # every request that was drawn has no sample
            found[resample] = np.quantile(values, quantiles)
            continue
        places = np.searchsorted(below, quantiles * below[-1])
        found[resample] = values[np.minimum(places, len(values) - 1)]
    return np.quantile(found, 0.025, axis=0), np.quantile(found, 0.975, axis=0)
