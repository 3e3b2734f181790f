"""What workers report, laid out as Prometheus families with labels `worker` and `role`.

Every name of the contract is there from the first scrape, at zero until somebody reports it, so that an alert on
it can be told from a misspelt one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.counters import HISTOGRAM_BUCKETS, split_label
from coordinator.registry import Worker

PREFIX = "kvferry_"

COUNTERS = {
    "num_preemptions_total": "Requests taken out of a running batch to make room.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
    "kv_transfer_bytes_total": "KV bytes received and verified, by channel.",
    "kv_transfer_failures_total": "KV transfers given up, each to be tried again, by reason: revoked (the decode pool "
    "is full), refused (by the decode worker), timeout (nothing moves: look at the link), bad_blocks (damaged three "
    "times), unreachable (the peer is gone).",
    "kv_channel_failures_total": "Channels to a decode worker that did not open or were lost, by channel.",
    "kv_checksum_failures_total": "KV blocks that came damaged and were asked for again. More than a stray one: a link "
    "or memory is faulty.",
    "requests_migrated_total": "Attempts given up and begun anew from the tokens so far, because a worker was lost, "
    "failed, refused or left: clients saw a pause.",
    "late_messages_total": "Messages about what has ended, moved on or never was, by kind: answered, without effect. "
    "Some come with every abort and death; a steady rate beside neither means a link that delays or doubles.",
    "superseded_messages_total": "Messages left on a connection whose name a newer one took over (a process stood "
    "still, a link was down), dropped: they are said again. A steady rate: something calls that gives no name.",
    "protocol_violations_total": "Messages dropped because no process of this cluster says them there: garbage, "
    "another version's, a kind for another socket, a name that is another's. Processes that are late, restarted or "
    "cut off make none: look for a stranger at the ports.",
    "lost_tokens_total": "Tokens computed and thrown away, by cause: preemption (the decode pool has too few blocks), "
    "migration (workers die or leave), abort (clients leave).",
    "tier_preemptions_total": "Requests of a tier taken out of a running batch to make room.",
    "tier_lost_tokens_total": "Tokens of a tier's requests computed and thrown away, by cause, as lost_tokens_total.",
    "recomputed_prompt_tokens_total": "Prompt tokens that a decode worker computed though their KV had been there: "
    "after a preemption, or for a next attempt. Rising steadily, its pool is too small.",
    "refused_handshakes_total": "Callers that were not let in, by reason.",
    "failed_handshakes_total": "Calls of ours that were not let in, by reason.",
    "dropped_samples_total": "Samples that were negative or not finite.",
}
HISTOGRAMS = {
    "step_seconds": "Time of one step of the model.",
    "batch_size": "Rows in one step.",
    "iteration_tokens_total": "Tokens computed in one step.",
    "kv_transfer_seconds": "From a transfer's offer to its delivery.",
    "request_prefill_time_seconds": "From a prompt's first chunk to its last.",
    "request_decode_time_seconds": "From the second token to the last.",
    "request_preemptions": "How often a request was taken out of a running batch to make room, until its end.",
}
FRONT_NAMES = frozenset({
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "requests_rejected_total",
    "requests_aborted_total",
})  # fmt: skip
"""Counted where clients are: a worker's count of the same name would be a second truth, and is left out."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What one process last said of itself. `counters` and `histograms` are named as in `common.counters`.

    The coordinator shows itself in the same way, with role "coordinator" and no blocks.
    """

    worker: str
    role: str
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    queue_age_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def blocks_total(self) -> int:
        return self.blocks_free + self.blocks_held + self.blocks_cached

    @property
    def labels(self) -> dict[str, str]:
        return {"worker": self.worker, "role": self.role}


def snapshot_of(worker: Worker) -> WorkerSnapshot:
    load = worker.load
    return WorkerSnapshot(
        worker=worker.id,
        role=worker.role,
        running=load.running,
        waiting=load.waiting,
        blocks_free=load.blocks_free,
        blocks_held=load.blocks_held,
        blocks_cached=load.blocks_cached,
        counters=worker.totals(),
        histograms=worker.histogram_totals(),
    )


class SnapshotCollector(Collector):
    """Renders the snapshots that it was last shown."""

    def __init__(self) -> None:
        self._snapshots: tuple[WorkerSnapshot, ...] = ()

    def show(self, snapshots: Iterable[WorkerSnapshot]) -> None:
        self._snapshots = tuple(snapshots)

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests being computed.", lambda of: of.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", lambda of: of.waiting)
        yield self._gauge(
            "queue_age_seconds", "Age of the oldest waiting request.", lambda of: of.queue_age_s
        )
        yield self._cache_usage()
        yield self._blocks()
        yield from self._counters()
        for name, help in HISTOGRAMS.items():
            yield self._histogram(name, help)

    def _gauge(self, name: str, help: str, value: Callable[[WorkerSnapshot], float]) -> Metric:
        metric = Metric(PREFIX + name, help, "gauge")
        for snapshot in self._snapshots:
            metric.add_sample(metric.name, snapshot.labels, value(snapshot))
        return _at_least_zero(metric)

    def _cache_usage(self) -> Metric:
        metric = Metric(PREFIX + "kv_cache_usage_perc", "Share of KV blocks that are held, 0 to 1.", "gauge")
        for snapshot in self._snapshots:
            if snapshot.blocks_total:
                metric.add_sample(metric.name, snapshot.labels, snapshot.blocks_held / snapshot.blocks_total)
        return _at_least_zero(metric)

    def _blocks(self) -> Metric:
        metric = Metric(PREFIX + "kv_blocks", "KV blocks by state.", "gauge")
        for snapshot in self._snapshots:
            if snapshot.blocks_total:
                counts = (snapshot.blocks_free, snapshot.blocks_held, snapshot.blocks_cached)
                for state, count in zip(("free", "held", "cached"), counts, strict=True):
                    metric.add_sample(metric.name, {**snapshot.labels, "state": state}, count)
        return _at_least_zero(metric)

    def _counters(self) -> Iterator[Metric]:
        families = {name: _counter(name, help) for name, help in COUNTERS.items()}
        for snapshot in self._snapshots:
            for key, value in snapshot.counters.items():
                name, labels = split_label(key)
                if name in FRONT_NAMES or name in HISTOGRAMS or not _NAME.fullmatch(name):
                    continue
                family = families.setdefault(name, _counter(name, "Counted by a worker."))
                family.add_sample(PREFIX + name, {**snapshot.labels, **labels}, value)
        yield from (_at_least_zero(family, PREFIX + name) for name, family in families.items())

    def _histogram(self, name: str, help: str) -> Metric:
        metric = Metric(PREFIX + name, help, "histogram")
        bounds = [*map(str, map(float, HISTOGRAM_BUCKETS[name])), "+Inf"]
        for snapshot in self._snapshots:
            row = snapshot.histograms.get(name, ())
            if len(row) == len(bounds) + 2:
                add_histogram(metric, snapshot.labels, bounds, row)
        if not metric.samples:
            add_histogram(metric, {}, bounds, (0.0,) * (len(bounds) + 2))
        return metric


def _counter(name: str, help: str) -> Metric:
    return Metric(PREFIX + name.removesuffix("_total"), help, "counter")


def _at_least_zero(metric: Metric, sample_name: str | None = None) -> Metric:
    if not metric.samples:
        metric.add_sample(sample_name or metric.name, {}, 0.0)
    return metric


def add_histogram(metric: Metric, labels: dict[str, str], bounds: list[str], row: tuple[float, ...]) -> None:
    """`row` is (sum, count, samples per bucket …); Prometheus wants each bucket to hold those below it too."""
    below = 0.0
    for bound, count in zip(bounds, row[2:], strict=True):
        below += count
        metric.add_sample(metric.name + "_bucket", {**labels, "le": bound}, below)
    metric.add_sample(metric.name + "_sum", labels, row[0])
    metric.add_sample(metric.name + "_count", labels, row[1])
