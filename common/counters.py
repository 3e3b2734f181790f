"""Counters and histograms of one process, as plain numbers that travel in heartbeats. Pure.

Counters are cumulative for one incarnation. A label is part of the name: `late_messages_total{kind="Accept"}`.
Counting can never stop the work it counts: a negative or non-finite amount is dropped and itself counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

STEP_SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FEW_BUCKETS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)
COUNT_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)

HISTOGRAM_BUCKETS: dict[str, Sequence[float]] = {
    "step_seconds": STEP_SECONDS_BUCKETS,
    "batch_size": COUNT_BUCKETS,
    "iteration_tokens_total": COUNT_BUCKETS,
    "kv_transfer_seconds": SECONDS_BUCKETS,
    "request_prefill_time_seconds": SECONDS_BUCKETS,
    "request_decode_time_seconds": SECONDS_BUCKETS,
    "request_preemptions": FEW_BUCKETS,
}

# Tiers are named by people: what would end a label's value early is written as _.
_PLAIN = str.maketrans(dict.fromkeys('",{}', "_"))


class Counters:
    """Cumulative numbers by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._histograms: dict[str, list[float]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        if not (math.isfinite(amount) and amount >= 0):
            name, amount, labels = "dropped_samples_total", 1.0, {"metric": name}
        key = labelled(name, **labels) if labels else name
        self.values[key] = self.values.get(key, 0.0) + amount

    def total(self, name: str) -> float:
        """Of one counter, over all its labels."""
        return sum(value for key, value in self.values.items() if key.partition("{")[0] == name)

    def observe(self, name: str, value: float) -> None:
        """One sample of a histogram named in HISTOGRAM_BUCKETS."""
        if not (math.isfinite(value) and value >= 0):
            self.add("dropped_samples_total", metric=name)
            return
        buckets = HISTOGRAM_BUCKETS[name]
        row = self._histograms.setdefault(name, [0.0] * (len(buckets) + 3))
        row[0] += value
        row[1] += 1
        row[2 + bisect_left(buckets, value)] += 1

    def histograms(self) -> dict[str, tuple[float, ...]]:
        """Name → (sum, count, samples per bucket, the last one above all bounds)."""
        return {name: tuple(row) for name, row in self._histograms.items()}


def count_lost(counters: Counters, tokens: float, *, cause: str, tier: str) -> None:
    """Tokens whose KV was computed and thrown away. By tier in a family of its own: sums over causes stay as they
    were."""
    counters.add("lost_tokens_total", tokens, cause=cause)
    counters.add("tier_lost_tokens_total", tokens, tier=tier, cause=cause)


def labelled(name: str, **labels: str) -> str:
    inside = ",".join(f'{key}="{value.translate(_PLAIN)}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def split_label(key: str) -> tuple[str, dict[str, str]]:
    """The reverse of `labelled`."""
    name, _, inside = key.partition("{")
    pairs = (pair.partition("=") for pair in inside.rstrip("}").split(",") if pair)
    return name, {label: value.strip('"') for label, _, value in pairs}
