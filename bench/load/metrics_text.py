"""What Prometheus text says before and after a run, and what lies between. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Scrape = Mapping[str, float]
"""Sample name, with its `le` where it has one, → value summed over all other labels."""


def parse_metrics(text: str) -> dict[str, float]:
    """Raises ValueError where the text is none of Prometheus'."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bound = sample.labels.get("le")
            found[f"{sample.name}|{bound}" if bound is not None else sample.name] += sample.value
    return dict(found)


def grown(name: str, before: Scrape, after: Scrape) -> float | None:
    """A counter's growth; None where the server has no such counter."""
    found = _key(name, after)
    return None if found is None else after[found] - before.get(found, 0.0)


def went_back(before: Scrape, after: Scrape) -> bool:
    """Counters only grow: one that is less than before was counted by another process. Of a scrape that gave nothing
    nothing is known."""
    return bool(after) and any(
        after.get(key, 0.0) < value
        for key, value in before.items()
        if key.partition("|")[0].endswith(("_total", "_bucket"))
    )


def histogram_quantile(name: str, quantile: float, before: Scrape, after: Scrape) -> float | None:
    """Of what was observed between two scrapes, interpolated inside its bucket; None where there was nothing."""
    buckets = [
        (float(key.partition("|")[2]), value - before.get(key, 0.0))
        for key, value in after.items()
        if _same(key.partition("|")[0], f"{name}_bucket")
    ]
    buckets.sort()
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= quantile * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (quantile * total - below) / max(count - below, 1e-12)
        low, below = bound, count
    return low


def _key(name: str, scrape: Scrape) -> str | None:
    return next((key for key in scrape if _same(key, name)), None)


def _same(sample: str, name: str) -> bool:
    """Servers put a prefix of their own before names they share: `kvferry_`, `vllm:`."""
    return sample == name or (
        sample.endswith(name) and sample[: -len(name)] in ("kvferry_", "vllm:", "sglang:")
    )
