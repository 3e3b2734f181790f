from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.counters import HISTOGRAM_BUCKETS, Counters
from common.lifecycle import LIVE_PHASES
from coordinator.metrics import Metrics
from coordinator.targets import Targets
from coordinator.worker_metrics import WorkerSnapshot

CONTRACT = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "iteration_tokens_total", "kv_blocks", "kv_transfer_bytes_total",
    "kv_transfer_seconds", "kv_transfer_failures_total", "kv_checksum_failures_total",
    "requests_rejected_total", "requests_aborted_total", "requests_migrated_total",
    "late_messages_total", "handover_gap_seconds", "lost_tokens_total", "queue_age_seconds",
    "step_seconds", "batch_size",
]  # fmt: skip


def samples(metrics: Metrics, snapshots: Sequence[WorkerSnapshot] = ()) -> dict[tuple[str, str], float]:
    """(name, labels in order) → value, as a Prometheus parser reads them."""
    text = metrics.render(snapshots).decode()
    return {
        (sample.name, ",".join(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def worker() -> WorkerSnapshot:
    counters = Counters()
    counters.add("kv_transfer_bytes_total", 4096)
    counters.add("late_messages_total", 2, kind="Accept")
    counters.add("late_messages_total", 3, kind="Offer")
    counters.add("something_new_total", 7)
    counters.add("prompt_tokens_total", 99)
    for seconds in (0.004, 0.02, 100.0):
        counters.observe("step_seconds", seconds)
    counters.observe("iteration_tokens_total", 3)
    return WorkerSnapshot(
        "d-0",
        "decode",
        running=3,
        waiting=2,
        blocks_free=5,
        blocks_held=3,
        blocks_cached=2,
        queue_age_s=1.5,
        counters=counters.values,
        histograms=counters.histograms(),
    )


@pytest.mark.parametrize("snapshots", [[], [worker()]])
def test_every_name_of_the_contract_is_there_with_its_help(snapshots: list[WorkerSnapshot]) -> None:
    text = Metrics(("default",)).render(snapshots).decode()
    for name in CONTRACT:
        assert re.search(rf"^# HELP kvferry_{name} \S", text, re.MULTILINE), name
        if name not in ("requests_rejected_total",):
            assert re.search(rf"^kvferry_{name}(_count|_bucket)?[ {{]", text, re.MULTILINE), name
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(families) == len(set(families))
    assert "_created" not in text


def test_what_a_worker_says() -> None:
    seen = samples(Metrics(("default",)), [worker(), WorkerSnapshot("p-0", "prefill", blocks_free=1)])
    of = "role=decode,worker=d-0"
    assert seen["kvferry_num_requests_running", of] == 3
    assert seen["kvferry_num_requests_waiting", of] == 2
    assert seen["kvferry_num_requests_running", "role=prefill,worker=p-0"] == 0
    assert seen["kvferry_queue_age_seconds", of] == 1.5
    assert seen["kvferry_kv_cache_usage_perc", of] == 0.3
    assert [
        seen["kvferry_kv_blocks", f"role=decode,state={state},worker=d-0"]
        for state in ("free", "held", "cached")
    ] == [5, 3, 2]
    assert seen["kvferry_kv_transfer_bytes_total", of] == 4096
    assert seen["kvferry_late_messages_total", "kind=Accept,role=decode,worker=d-0"] == 2
    assert seen["kvferry_late_messages_total", "kind=Offer,role=decode,worker=d-0"] == 3
    assert seen["kvferry_something_new_total", of] == 7
    assert ("kvferry_prompt_tokens_total", of) not in seen


def test_histograms_of_a_worker_are_cumulative() -> None:
    seen = samples(Metrics(("default",)), [worker()])
    bounds = HISTOGRAM_BUCKETS["step_seconds"]
    row = [
        seen["kvferry_step_seconds_bucket", f"le={float(bound)},role=decode,worker=d-0"] for bound in bounds
    ]
    assert row == sorted(row)
    assert row[0] == 1
    assert row[-1] == 2
    assert seen["kvferry_step_seconds_bucket", "le=+Inf,role=decode,worker=d-0"] == 3
    assert seen["kvferry_step_seconds_count", "role=decode,worker=d-0"] == 3
    assert seen["kvferry_step_seconds_sum", "role=decode,worker=d-0"] == pytest.approx(100.024)


def test_a_worker_that_sends_nonsense_does_not_stop_the_scrape() -> None:
    odd = WorkerSnapshot(
        'w"\n\\',
        "decode",
        counters={"Bad-Name": 1, "": 2, 'ok_total{kind="a\nb"}': 3},
        histograms={"step_seconds": (1.0,)},
    )
    assert samples(Metrics(("default",)), [odd])


def test_one_request_on_its_way() -> None:
    metrics = Metrics(("default", "fast"))
    meter = metrics.meter("fast", started_s=10.0)
    meter.tokens_accepted(1, 30, 10.2)
    meter.token_out(10.2)
    meter.tokens_accepted(2, 30, 10.5)
    meter.token_out(10.5)
    meter.tokens_accepted(1, 30, 10.8)
    meter.token_out(10.8)
    meter.end("stop", 11.0)
    meter.end("error", 99.0)  # counts once
    seen = samples(metrics)
    assert seen["kvferry_prompt_tokens_total", "tier=fast"] == 30
    assert seen["kvferry_generation_tokens_total", "tier=fast"] == 4
    assert seen["kvferry_time_to_first_token_seconds_sum", "tier=fast"] == pytest.approx(0.2)
    assert seen["kvferry_handover_gap_seconds_sum", "tier=fast"] == pytest.approx(0.3)
    assert seen["kvferry_inter_token_latency_seconds_count", "tier=fast"] == 2
    assert seen["kvferry_request_time_per_output_token_seconds_sum", "tier=fast"] == pytest.approx(0.2)
    assert seen["kvferry_e2e_request_latency_seconds_sum", "tier=fast"] == pytest.approx(1.0)
    assert seen["kvferry_request_success_total", "finished_reason=stop"] == 1
    assert seen["kvferry_request_success_total", "finished_reason=error"] == 0
    assert seen["kvferry_time_to_first_token_seconds_count", "tier=default"] == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_a_sample_that_cannot_be_is_dropped_and_counted(value: float) -> None:
    metrics = Metrics(("default",))
    metrics.observe(metrics.queue_time, "default", value)
    metrics.meter("default", value).token_out(0.0 if value != -1.0 else -5.0)
    seen = samples(metrics)
    assert seen["kvferry_request_queue_time_seconds_count", "tier=default"] == 0
    assert seen["kvferry_front_dropped_samples_total", "metric=kvferry_request_queue_time_seconds"] == 1


def test_the_hand_over_gap_is_between_the_tokens_that_come_not_those_that_show() -> None:
    """1 one choice whose second token has no text yet  2 another, whose first two come together  3 one with a single
    token, of which there is no gap."""
    metrics = Metrics(("default",))
    meter = metrics.meter("default", started_s=0.0)
    meter.tokens_accepted(1, 3, 1.0, 0)
    meter.token_out(1.0, 0)
    meter.tokens_accepted(1, 3, 1.5, 0)  # half a character: nothing is shown
    meter.tokens_accepted(1, 3, 4.0, 0)
    meter.token_out(4.0, 0)
    meter.tokens_accepted(2, 3, 2.0, 1)
    meter.tokens_accepted(1, 3, 2.5, 2)
    meter.end("length", 5.0)
    seen = samples(metrics)
    assert seen["kvferry_handover_gap_seconds_count", "tier=default"] == 2
    assert seen["kvferry_handover_gap_seconds_sum", "tier=default"] == pytest.approx(0.5)


FAULTS = (
    "late_messages_total", "lost_tokens_total", "requests_migrated_total", "requests_aborted_total",
    "kv_transfer_failures_total", "kv_checksum_failures_total", "handover_gap_seconds",
    "protocol_violations_total", "superseded_messages_total",
)  # fmt: skip


def test_what_tells_of_faults_says_what_to_think_of_it() -> None:
    """More than what it counts: what it means when it moves."""
    text = Metrics(("default",)).render([]).decode()
    for name in FAULTS:
        found = re.search(rf"^# HELP kvferry_{name} (.*)$", text, re.MULTILINE)
        assert found and len(re.split(r"[.:] ", found[1])) > 1, name
    for phase in LIVE_PHASES:
        assert f'kvferry_requests_aborted_total{{phase="{phase}"}} 0.0' in text


def test_what_tiers_promise_is_judged_by_request() -> None:
    """1 first token and every gap in time  2 one gap over it  3 a late first token, and no gap  4 failed before any
    5 refused  6 a tier without a promise."""
    metrics = Metrics(("default", "chat"), {"chat": Targets(ttft_s=0.5, itl_s=0.1)})
    gaps_s = {"in time": [0.4, 0.09, 0.1], "gap": [0.4, 0.09, 0.11], "late": [0.6]}
    for times in gaps_s.values():
        meter, now_s = metrics.meter("chat", started_s=0.0), 0.0
        for gap_s in times:
            now_s += gap_s
            meter.tokens_accepted(1, 3, now_s)
            meter.token_out(now_s)
        meter.end("stop", now_s)
    metrics.meter("chat", started_s=0.0).end("error", 9.0)
    metrics.meter("default", started_s=0.0).end("error", 9.0)
    metrics.refused("chat")
    metrics.refused("default")
    seen = samples(metrics)
    found = {labels: value for (name, labels), value in seen.items() if name == "kvferry_tier_targets_total"}
    assert found == {
        "outcome=met,target=ttft,tier=chat": 2,
        "outcome=missed,target=ttft,tier=chat": 2,
        "outcome=refused,target=ttft,tier=chat": 1,
        "outcome=met,target=itl,tier=chat": 1,
        "outcome=missed,target=itl,tier=chat": 1,
    }


def test_queues_are_shown_by_tier_and_empty_ones_too() -> None:
    metrics = Metrics(("default", "chat"))
    metrics.show_queues({"chat": 2.5}, 300.0)
    seen = samples(metrics)
    assert seen["kvferry_tier_queue_age_seconds", "tier=chat"] == 2.5
    assert seen["kvferry_tenant_service_gap_tokens", ""] == 300
    metrics.show_queues({}, 0.0)
    assert samples(metrics)["kvferry_tier_queue_age_seconds", "tier=chat"] == 0
