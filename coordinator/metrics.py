"""What the front measures of requests, and the text of `/metrics`.

Every time is taken at the front on one monotonic clock: from the request's head to the first token, then from
token to token, as they are written (or, where an answer is sent whole, as they arrive). What workers count arrives
as snapshots and is laid out by `worker_metrics`. Measuring can never stop a request: a sample that is negative or
not finite is dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from common.lifecycle import LIVE_PHASES
from coordinator.targets import NO_TARGETS, Targets
from coordinator.token_metrics import TokenMetrics
from coordinator.worker_metrics import PREFIX, SnapshotCollector, WorkerSnapshot

TTFT_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
)
ITL_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
)
LONG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

OUTCOMES = {"ttft": ("met", "missed", "refused"), "itl": ("met", "missed")}
FINISHED_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Every name of the contract that is measured at the front. `tiers` start at zero, so that they are seen
    before their first request."""

    def __init__(self, tiers: Sequence[str], targets: Mapping[str, Targets] | None = None) -> None:
        self._tiers = tuple(tiers)
        self._targets = dict(targets or {})
        # Creation times of every series would double the text.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._snapshots = SnapshotCollector()
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Request head received to first token written.", TTFT_BUCKETS
        )
        self.tokens = TokenMetrics(ITL_BUCKETS)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean gap between the tokens of one request.",
            ITL_BUCKETS,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Request head received to last byte written.", LONG_BUCKETS
        )
        self.handover_gap = self._histogram(
            "handover_gap_seconds",
            "From a request's first token to its second, as they come to the front: what a client feels of the "
            "hand-over to a decode worker. It exceeds the inter-token latency by what transfers take.",
            ITL_BUCKETS,
        )
        self.targets = Counter(
            PREFIX + "tier_targets_total",
            "Requests by whether they met what their tier promises: ttft, and itl by every gap of theirs. Refused: by "
            "the forecast of their first token, or for lack of room.",
            ("tier", "target", "outcome"),
            registry=self._registry,
        )
        self.tier_queue_age = Gauge(
            PREFIX + "tier_queue_age_seconds",
            "Age of the oldest request of a tier that waits in the queue.",
            ("tier",),
            registry=self._registry,
        )
        self.service_gap = Gauge(
            PREFIX + "tenant_service_gap_tokens",
            "Between two tenants of one class that wait both: how far their service is apart, in tokens by weight "
            "(answer tokens count twice). Fair is below two of the largest requests.",
            registry=self._registry,
        )
        self.held = self._counter(
            "first_token_held_seconds_total",
            "Seconds that first tokens were held back, so that the gap to the second keeps the tier's ITL target.",
            "tier",
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time in the coordinator's queue.", QUEUE_BUCKETS
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests that got a first token.", "tier"
        )
        self.success = self._counter(
            "request_success_total", "Requests that were taken in, by how they ended.", "finished_reason"
        )
        self.aborted = self._counter(
            "requests_aborted_total",
            "Requests whose client left, by the phase they were in. Many before decoding: clients give up waiting.",
            "phase",
        )
        self.rejected = self._counter(
            "requests_rejected_total", "Requests that were not taken in, by the error's code.", "reason"
        )
        self.connections_closed = self._counter(
            "http_connections_closed_total", "Connections that were ended by a limit of the front.", "reason"
        )
        self.dropped = self._counter(
            "front_dropped_samples_total", "Samples that were negative or not finite.", "metric"
        )
        self._registry.register(self._snapshots)
        self._registry.register(self.tokens)
        self._begin_at_zero(tiers)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help, ("tier",), registry=self._registry, buckets=buckets)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(PREFIX + name, help, (label,), registry=self._registry)

    def _begin_at_zero(self, tiers: Sequence[str]) -> None:
        for tier in tiers:
            for metric in (self.ttft, self.tpot, self.e2e, self.handover_gap, self.queue_time):
                metric.labels(tier)
            self.prompt_tokens.labels(tier)
            self.held.labels(tier)
            self.tier_queue_age.labels(tier)
            targets = self.targets_of(tier)
            for target, within_s in (("ttft", targets.ttft_s), ("itl", targets.itl_s)):
                for outcome in OUTCOMES[target] if within_s is not None else ():
                    self.targets.labels(tier, target, outcome)
            self.tokens.of(tier)
        for reason in FINISHED_REASONS:
            self.success.labels(reason)
        for phase in LIVE_PHASES:
            self.aborted.labels(phase)

    def observe(self, histogram: Histogram, tier: str, seconds: float) -> None:
        if math.isfinite(seconds) and seconds >= 0:
            histogram.labels(tier).observe(seconds)
        else:
            self.dropped.labels(histogram._name).inc()

    def targets_of(self, tier: str) -> Targets:
        return self._targets.get(tier, NO_TARGETS)

    def judge(self, tier: str, target: str, seconds: float, within_s: float | None) -> None:
        """What a request came to, against a target of its tier, if there is one."""
        if within_s is not None:
            self.targets.labels(tier, target, "met" if seconds <= within_s else "missed").inc()

    def refused(self, tier: str) -> None:
        if self.targets_of(tier).ttft_s is not None:
            self.targets.labels(tier, "ttft", "refused").inc()

    def show_queues(self, ages_s: Mapping[str, float], service_gap: float) -> None:
        """Of the coordinator's queue, by tier; tiers that are not there have nobody in it."""
        for tier in {**dict.fromkeys(self._tiers), **ages_s}:
            self.tier_queue_age.labels(tier).set(ages_s.get(tier, 0.0))
        self.service_gap.set(service_gap)

    def meter(self, tier: str, started_s: float) -> RequestMeter:
        return RequestMeter(self, tier, started_s)

    def render(self, snapshots: Iterable[WorkerSnapshot]) -> bytes:
        """Prometheus text of the front and of these workers."""
        self._snapshots.show(snapshots)
        return generate_latest(self._registry)


@dataclass(slots=True)
class _Pace:
    """Of one choice: how many tokens came, the first of them when, and when the first and the last went out."""

    tokens: int = 0
    first_came_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0


class RequestMeter:
    """Times and counts of one request. `now_s` is monotonic, like `started_s` (when the request's head came).

    The first token of any choice is the request's first; gaps are between tokens of the same choice.
    """

    def __init__(self, metrics: Metrics, tier: str, started_s: float) -> None:
        self._metrics = metrics
        self._tier = tier
        self._tokens = metrics.tokens.of(tier)
        self._targets = metrics.targets_of(tier)
        self._worst_gap_s: float | None = None
        self._started_s = started_s
        self._paces: dict[int, _Pace] = {}
        self._ended = False
        self.first_token_s: float | None = None
        self.num_tokens = 0
        self._prompt_counted = False

    def tokens_accepted(self, count: int, prompt_tokens: int, now_s: float, choice: int = 0) -> float | None:
        """New output tokens arrived, with text to show or not. `prompt_tokens` are the request's, counted with its
        first token, which counts as none itself where only the prompt is shown. Returns the hand-over gap where the
        choice's second token is among them."""
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompt_tokens.labels(self._tier).inc(prompt_tokens)
        if count <= 0:
            return None
        self.num_tokens += count
        self._tokens.accepted += count
        pace = self._pace(choice)
        before = pace.tokens
        pace.tokens += count
        if before == 0:
            pace.first_came_s = now_s
        if before >= 2 or pace.tokens < 2:
            return None
        gap_s = now_s - pace.first_came_s
        self._metrics.observe(self._metrics.handover_gap, self._tier, gap_s)
        return gap_s

    def _pace(self, choice: int) -> _Pace:
        pace = self._paces.get(choice)
        if pace is None:
            pace = self._paces[choice] = _Pace()
        return pace

    def token_out(self, now_s: float, choice: int = 0) -> None:
        """A token's text was written, or arrived where the answer is sent whole."""
        if self.first_token_s is None:
            self.first_token_s = now_s
            took_s = now_s - self._started_s
            self._metrics.observe(self._metrics.ttft, self._tier, took_s)
            self._metrics.judge(self._tier, "ttft", took_s, self._targets.ttft_s)
        pace = self._pace(choice)
        if pace.first_s is None:
            pace.first_s = pace.last_s = now_s
            return
        gap_s = max(0.0, now_s - pace.last_s)
        self._tokens.gap(gap_s)
        if self._worst_gap_s is None or gap_s > self._worst_gap_s:
            self._worst_gap_s = gap_s
        pace.last_s = now_s

    def end(self, reason: str, now_s: float) -> None:
        """`reason` is stop, length, abort or error. Counts once."""
        if self._ended:
            return
        self._ended = True
        self._metrics.success.labels(reason).inc()
        if self.first_token_s is None and reason == "error":
            self._metrics.judge(self._tier, "ttft", math.inf, self._targets.ttft_s)
        if self._worst_gap_s is not None:
            self._metrics.judge(self._tier, "itl", self._worst_gap_s, self._targets.itl_s)
        self._metrics.observe(self._metrics.e2e, self._tier, now_s - self._started_s)
        later_tokens = sum(pace.tokens - 1 for pace in self._paces.values() if pace.tokens)
        spent = [pace.last_s - pace.first_s for pace in self._paces.values() if pace.first_s is not None]
        if spent and later_tokens:
            spent_s = sum(spent)
            self._metrics.observe(self._metrics.tpot, self._tier, spent_s / later_tokens)
