"""Statistics against known values, goodput and summaries on records of our own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.load.goodput import Targets, goodput, parse_targets
from bench.load.metrics_text import grown, histogram_quantile, parse_metrics, went_back
from bench.load.rate_search import RateSearch
from bench.load.records import Outcome, Record
from bench.load.result_file import BadResult, as_json, read_result, row_of
from bench.load.statistics import distribution, wilson
from bench.load.summary import summarize


def record(text_s: tuple[float, ...] = (0.1, 0.15, 0.2), outcome: Outcome = "ok", **fields: object) -> Record:
    known = {
        "index": 0,
        "due_s": 0.0,
        "sent_s": 0.0,
        "end_s": 0.25,
        "asked_prompt_tokens": 8,
        "asked_output_tokens": 3,
    }
    counted = {"prompt_tokens": 8, "output_tokens": 3} if outcome == "ok" else {}
    return Record(outcome=outcome, text_s=text_s, **(known | counted | fields))  # type: ignore[arg-type]


# ------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (270, 300, 0.8608, 0.9291)],
)
def test_wilson_is_that_of_the_textbooks(hits: int, of: int, low: float, high: float) -> None:
    found = wilson(hits, of)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)
    assert found.low <= found.value == hits / of <= found.high


def test_percentiles_are_numpys_and_their_bounds_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(4)
    holds = 0
    for trial in range(30):
        sample = random.exponential(1.0, 200)
        found = distribution([[value] for value in sample.tolist()], trial)
        assert found is not None
        assert found.p95.value == pytest.approx(np.quantile(sample, 0.95))
        holds += found.p50.low <= np.log(2) <= found.p50.high
    assert holds >= 25, "95 % of 30 are 28.5"


def test_samples_of_one_request_are_not_counted_as_independent() -> None:
    """Ten requests, each with a hundred equal gaps: what is known of the median is what ten numbers tell."""
    values = np.random.default_rng(1).exponential(1.0, 10).tolist()
    together = distribution([[value] * 100 for value in values], 1)
    alone = distribution([[value] for value in values for _ in range(100)], 1)
    assert together is not None and alone is not None
    assert together.p50.value == alone.p50.value
    assert together.p50.high - together.p50.low > 2 * (alone.p50.high - alone.p50.low)


def test_nothing_measured_is_none_and_the_seed_decides() -> None:
    assert distribution([], 1) is None
    assert distribution([[], []], 1) is None
    samples = [[1.0, 2.0], [], [5.0]]
    assert distribution(samples, 3) == distribution(samples, 3)


# ------------------------------------------------------------ goodput


def test_targets_are_read() -> None:
    assert parse_targets(["ttft:500", "itl:75,e2e:1e3"]) == Targets(ttft=500, itl=75, e2e=1000)
    assert str(Targets(ttft=500, tpot=4.5)) == "ttft:500 tpot:4.5"
    for bad in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "tftt:5", "ttft:1 ttft:2"):
        with pytest.raises(ValueError, match="expected"):
            parse_targets([bad])


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Targets(ttft=101), True),
        (Targets(ttft=99), False),
        (Targets(itl=61), True),
        (Targets(itl=59), False),  # one gap of sixty, though their mean is fifty
        (Targets(tpot=51), True),
        (Targets(tpot=49), False),
        (Targets(e2e=249), False),
        (Targets(ttft=101, itl=59), False),
    ],
)
def test_every_target_and_every_gap_has_to_be_met(targets: Targets, met: bool) -> None:
    assert targets.met_by(record((0.1, 0.16, 0.2))) is met


def test_who_failed_attains_nothing_and_who_left_is_not_judged() -> None:
    records = [
        record(),
        record((), "rejected"),
        record((0.1,), "failed"),
        record((0.1,), "left"),
        record((), "interrupted"),
    ]
    found = goodput(records, Targets(ttft=1000), 2.0)
    assert (found.judged, found.attained, found.requests_per_s) == (3, 1, 0.5)


# ------------------------------------------------------------ summary and file


def test_a_summary_counts_tokens_as_the_server_does_and_rates_over_the_whole_time() -> None:
    records = [
        record(index=0, end_s=1.0, output_tokens=6),
        record(index=1, end_s=4.0, due_s=2.0, sent_s=2.0, text_s=(2.5, 2.6)),
        record((), "rejected", index=2, end_s=2.0, due_s=1.0, sent_s=1.0, fault="http_429", words="no room"),
    ]
    found = summarize(records, Targets(), 1)
    assert (found.duration_s, found.completed, found.sent) == (4.0, 2, 3)
    assert found.requests_per_s == 0.5
    assert found.output_tokens_per_s == 9 / 4
    assert found.tokens_per_chunk == 9 / 5
    assert found.faults == {"http_429": 1} and found.first_words == {"http_429": "no room"}
    ttft = found.distributions["ttft_ms"]
    assert ttft is not None and ttft.count == 2 and ttft.mean == pytest.approx(300)
    assert found.offered_per_s == 1.5
    assert (found.prompts_as_asked, found.outputs_as_asked) == (2, 1)


def test_without_usage_chunks_are_counted_and_that_is_said() -> None:
    found = summarize([record(prompt_tokens=None, output_tokens=None)], Targets(), 1)
    assert found.output_tokens == 3 and not found.tokens_counted_by_server


def test_a_result_comes_back_from_its_file() -> None:
    rows = [row_of(record())]
    text = as_json(
        {
            "settings": {"request_rate": float("inf")},
            "summary": summarize([record()], Targets(), 1),
            "requests": rows,
        }
    )
    found = read_result(text)
    assert found["settings"]["request_rate"] == "inf"
    assert found["requests"][0]["gaps_ms"] == [50.0, 50.0]
    assert found["summary"]["distributions"]["ttft_ms"]["p50"]["value"] == pytest.approx(100)
    for bad in ("", "{}", "[]", json.dumps({"format": "kvferry-bench-1"})):
        with pytest.raises(BadResult):
            read_result(bad)


# ------------------------------------------------------------ what servers count

BEFORE = """kvferry_x_total{tier="a"} 3
vllm:queue_bucket{le="0.1"} 1
vllm:queue_bucket{le="1.0"} 1
vllm:queue_bucket{le="+Inf"} 1
"""
AFTER = """kvferry_x_total{tier="a"} 5
kvferry_x_total{tier="b"} 7
vllm:queue_bucket{le="0.1"} 5
vllm:queue_bucket{le="1.0"} 9
vllm:queue_bucket{le="+Inf"} 9
"""


def test_counters_and_histograms_are_of_the_run_alone() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    assert grown("x_total", before, after) == 9
    assert grown("y_total", before, after) is None
    assert histogram_quantile("queue", 0.25, before, after) == pytest.approx(0.05)
    assert histogram_quantile("queue", 0.75, before, after) == pytest.approx(0.55)
    assert histogram_quantile("queue", 0.5, after, after) is None


def test_a_counter_that_went_back_is_another_process() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    assert not went_back(before, after) and not went_back(before, before)
    assert went_back(after, before)
    assert went_back(before, {"other_total": 1.0}), "a series that is gone"
    assert not went_back(before, {}), "nobody answered: nothing is known"
    assert not went_back({"kvferry_running": 4.0}, {"kvferry_running": 1.0}), "no counter"


# ------------------------------------------------------------ the highest rate


@pytest.mark.parametrize(("first", "limit"), [(1.0, 5.3), (8.0, 5.3), (5.3, 5.3)])
def test_the_rate_is_found_from_both_sides(first: float, limit: float) -> None:
    search = RateSearch(first, 0.9, 0.05)
    for _ in range(30):
        rate = search.next_rate()
        if rate is None:
            break
        search.tell(rate, 1.0 if rate <= limit else 0.4)
    low, high, found = search.passing, search.failing, search.found()
    assert low is not None and high is not None and found is not None
    assert low <= limit < high <= low * 1.05
    assert low <= found <= high


def test_a_service_that_never_passes_ends_the_search() -> None:
    search = RateSearch(4.0, 0.9, 0.05)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, 0.1)
    assert search.found() is None and len(search.shares) < 10


def test_a_burst_that_is_absorbed_ends_the_search() -> None:
    """Thirty requests of three seconds each: from 10/s on they are a burst, which this service takes at any rate."""
    search = RateSearch(1.0, 0.9, 0.05)
    asked = []
    while (rate := search.next_rate()) is not None:
        asked.append(rate)
        search.tell(rate, 1.0, came_in_s=30 / rate, whole_s=30 / rate + 3)
    assert asked == [1, 2, 4, 8, 16]
    assert (search.found(), search.passing, search.failing, search.too_few) == (8, 8, None, 16)


def test_a_burst_that_fails_is_a_rate_that_fails() -> None:
    search = RateSearch(8.0, 0.9, 0.05)
    search.tell(8.0, 0.5, came_in_s=1.0, whole_s=9.0)
    assert search.too_few is None and search.next_rate() == 4.0
