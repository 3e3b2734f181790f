"""What is left of a fault for whoever runs the service: its counters, and the timelines of requests that ended."""

from __future__ import annotations

from typing import Any

import pytest

from bench.virtual_network import Fate, Parcel
from bench.virtual_worker import Shape
from common.lifecycle import LIVE_PHASES
from common.messages import Abort, Block, Cancel, Credit, Handover, Message, Offer, Started
from common.request import RequestId
from coordinator.tracker import RECENT_LIMIT
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

TINY = Shape(num_blocks=44, max_num_seqs=2, max_num_batched_tokens=64)
NAMES = (
    "late_messages_total", "lost_tokens_total", "requests_migrated_total", "requests_aborted_total",
    "kv_transfer_failures_total", "kv_checksum_failures_total", "num_preemptions_total",
)  # fmt: skip


def moved(cluster: StoryCluster) -> set[str]:
    """Which of the counters of faults are not zero."""
    return {name for name in NAMES if cluster.counted(name)}


def timeline(cluster: StoryCluster, name: str = "r") -> dict[str, Any]:
    found = cluster.cluster.timeline(RequestId(name), cluster.now)
    assert found is not None
    return found


# ---------------------------------------------------------------- aborts, by phase


def brought_to(phase: str) -> StoryCluster:
    """The coordinator sees request "r" in this phase."""
    if phase in ("preempted", "decode_ready"):
        cluster = StoryCluster(1, 1, decode_shape=TINY)
        cluster.ask("other", drawn("other", 330), 300)
        cluster.until(lambda: cluster.phase("other") == "decoding")
        cluster.ask("r", drawn("r", 300), 300)
    elif phase == "waiting":
        cluster = StoryCluster(prefill_shape=Shape(max_num_batched_tokens=64))
        for number in range(3):
            cluster.ask(f"before-{number}", drawn(f"before-{number}", 600))
        cluster.ask("r", drawn("r", 300))
    else:
        cluster = StoryCluster(prefill_shape=Shape(max_num_batched_tokens=64))
        cluster.fate = lambda message: 0.5 if isinstance(message, Block) and phase == "kv_ready" else 0.0
        cluster.ask("r", drawn("r", 300), 100)
    cluster.until(lambda: cluster.phase("r") == phase)
    return cluster


@pytest.mark.parametrize("phase", LIVE_PHASES)
def test_an_abort_is_counted_by_the_phase_that_its_worker_says(phase: str) -> None:
    cluster = brought_to(phase)
    cluster.leave(RequestId("r"))
    aborted = {n: v for n, v in cluster.cluster.counters.values.items() if n.startswith("requests_aborted")}
    assert aborted == {f'requests_aborted_total{{phase="{phase}"}}': 1.0}
    cluster.leave(RequestId("r"))
    for name in list(cluster.answers):
        cluster.leave(name)
    cluster.go(0.1)
    assert cluster.held() == {}
    assert timeline(cluster)["phase"] == "aborted"
    assert cluster.cluster.counters.values[f'requests_aborted_total{{phase="{phase}"}}'] >= 1
    cluster.settle()


# ---------------------------------------------------------------- counters of faults


def test_where_nothing_goes_wrong_no_counter_of_faults_moves() -> None:
    cluster = StoryCluster(2, 2, delay_s=(0.0003, 0.0003))
    cluster.until_over(*(cluster.ask(f"r{n}", drawn(f"r{n}", 50 + 20 * n), 30) for n in range(12)))
    cluster.settle()
    assert moved(cluster) == set() and cluster.front.late_rows == cluster.front.lost_messages == 0


def test_a_migration_is_counted_and_what_it_threw_away() -> None:
    cluster = StoryCluster(1, 2, delay_s=(0.0003, 0.0003))
    answer = cluster.ask("r", drawn("r", 100), 40)
    cluster.until(lambda: len(answer.ids) == 10)
    cluster.kill(timeline(cluster)["decode_worker"], noticed=True)
    cluster.until_over(answer)
    cluster.settle()
    # Both of its workers are told to end it, and the prefill worker had done so.
    assert moved(cluster) == {"requests_migrated_total", "lost_tokens_total", "late_messages_total"}
    assert cluster.counted("requests_migrated_total") == 1
    assert cluster.counted("lost_tokens_total") == cluster.lost("migration") >= 100 + 9


def test_a_client_that_leaves_is_counted_and_what_it_threw_away() -> None:
    cluster = StoryCluster(delay_s=(0.0003, 0.0003))
    answer = cluster.ask("r", drawn("r", 100), 40)
    cluster.until(lambda: len(answer.ids) == 10)
    cluster.leave(RequestId("r"))
    cluster.settle()
    assert moved(cluster) == {"requests_aborted_total", "lost_tokens_total", "late_messages_total"}
    assert cluster.counted("lost_tokens_total") == cluster.lost("abort") >= 100 + 9


def test_preemptions_are_counted_and_what_they_threw_away() -> None:
    cluster = brought_to("preempted")
    cluster.until_over(*cluster.answers.values())
    cluster.settle()
    assert cluster.counted("num_preemptions_total") >= 1
    assert cluster.counted("lost_tokens_total") == cluster.lost("preemption") >= 300
    assert "requests_migrated_total" not in moved(cluster)


def test_revoked_transfers_are_counted() -> None:
    cluster = StoryCluster(decode_shape=Shape(num_blocks=40, max_num_seqs=8), delay_s=(0.0003, 0.0003))
    cluster.fate = lambda message: 0.4 if isinstance(message, Block) and message.id == "late" else 0.0
    answers = [cluster.ask(f"r{number}", drawn(f"r{number}", 100), 120) for number in range(3)]
    cluster.until(lambda: all(len(answer.ids) > 1 for answer in answers))
    answers.append(cluster.ask("late", drawn("late", 100), 120))
    cluster.until_over(*answers)
    cluster.settle()
    counters = cluster.decode_node().records.counters.values
    assert counters['kv_transfer_failures_total{reason="revoked"}'] >= 1
    assert "requests_migrated_total" not in moved(cluster), "its prefill worker had every block still"


@pytest.mark.parametrize("times, fails", [(1, False), (2, False), (3, True)])
def test_damaged_blocks_are_counted_and_a_transfer_fails_at_the_third_time(times: int, fails: bool) -> None:
    cluster = StoryCluster(delay_s=(0.0003, 0.0003))
    usual = cluster.network.policy
    spoilt: list[Message] = []

    def spoil(parcel: Parcel) -> Fate:
        message = parcel.message
        if isinstance(message, Block) and message.index == 3 and len(spoilt) < times:
            spoilt.append(message)
            return Fate((0.0003,), corrupt=True)
        return usual(parcel)

    cluster.network.policy = spoil
    answer = cluster.ask("r", drawn("r", 100))
    cluster.until_over(answer)
    check_exact(answer, drawn("r", 100))
    cluster.settle()
    assert cluster.counted("kv_checksum_failures_total") == times
    failures = cluster.workers_counter("prefill-0", "kv_transfer_failures_total")
    assert failures == ({'kv_transfer_failures_total{reason="bad_blocks"}': 1.0} if fails else {})
    assert cluster.counted("requests_migrated_total") == fails


@pytest.mark.parametrize("kind", [Offer, Handover, Credit, Started, Block, Abort, Cancel])
def test_a_message_that_comes_again_after_the_end_is_counted_by_its_kind(kind: type[Message]) -> None:
    """Doubled, the second one half a second later; and nothing else happens."""
    cluster = StoryCluster(delay_s=(0.0003, 0.0003))
    usual = cluster.network.policy
    cluster.network.policy = lambda parcel: (
        Fate((0.0003, 0.5)) if isinstance(parcel.message, kind) else usual(parcel)
    )
    answer = cluster.ask("r", drawn("r", 320), 20)
    if kind in (Abort, Cancel):
        cluster.until(lambda: cluster.phase("r") == "kv_ready" or len(answer.ids) > 0)
        cluster.leave(RequestId("r"))
    cluster.until_over(answer)
    cluster.settle()
    kinds = {name for c in cluster.all_counters() for name in c.values if name.startswith("late_messages")}
    expected = {f'late_messages_total{{kind="{kind.__name__}"}}'}
    assert expected <= kinds
    if kind in (Credit, Started):  # the others bring about answers, which are as late
        assert kinds == expected


# ---------------------------------------------------------------- timelines


def check_times(found: dict[str, Any], took_s: float) -> None:
    """Its phases together are the whole of it, and its workers' parts nearly so."""
    assert found["seconds"] == pytest.approx(took_s, abs=0.03)
    assert sum(found["coordinator_seconds"].values()) == pytest.approx(found["seconds"], abs=1e-5)
    assert 0 <= found["unattributed_seconds"] <= found["seconds"]


def test_the_timeline_of_a_request_that_finished() -> None:
    cluster = StoryCluster()
    prompt = drawn("r", 320)
    cluster.until_over(cluster.ask("warm", prompt[:64], 2))
    answer = cluster.ask("r", prompt, 20)
    cluster.until_over(answer)
    cluster.settle()
    found = timeline(cluster)
    assert (found["phase"], found["attempts"], found["output_tokens"]) == ("finished", 1, 20)
    assert (found["prefill_worker"], found["decode_worker"]) == ("prefill-0", "decode-0")
    assert set(found["coordinator_seconds"]) == set(LIVE_PHASES) - {"preempted"}
    check_times(found, answer.stamps[-1] - answer.submitted)
    assert 0 < found["unattributed_seconds"] < 0.01, "four ways between processes"
    parts = {part["worker"]: part for part in found["workers"]}
    assert set(parts["prefill-0"]["seconds"]) == {"queued", "prefilling", "kv_ready"}
    assert set(parts["decode-0"]["seconds"]) == {"kv_ready", "decode_ready", "decoding"}
    assert (found["cached_tokens"], found["blocks"]) == (64, 22)
    assert found["transferred_bytes"] == parts["decode-0"]["transferred_bytes"] == 16 * 1000
    assert found["last_fault"] == "" and [one["fault"] for one in found["tries"]] == [""]


def test_the_timeline_of_a_request_that_moved() -> None:
    cluster = StoryCluster(1, 2)
    answer = cluster.ask("r", drawn("r", 100), 40)
    cluster.until(lambda: len(answer.ids) == 10)
    victim = timeline(cluster)["decode_worker"]
    cluster.kill(victim, noticed=True)
    cluster.until_over(answer)
    cluster.settle()
    found = timeline(cluster)
    assert (found["phase"], found["attempts"]) == ("finished", 2)
    check_times(found, answer.stamps[-1] - answer.submitted)
    first, second = found["tries"]
    assert first == {
        "number": 1,
        "attempt": str(int(second["attempt"]) - 1),
        "prefill_worker": "prefill-0",
        "decode_worker": victim,
        "fault": f"{victim} died",
    }
    assert second["fault"] == "" and second["decode_worker"] == found["decode_worker"] != victim
    said = [(part["worker"], part["attempt"], part["outcome"]) for part in found["workers"]]
    assert said == [
        ("prefill-0", first["attempt"], "handed_over"),
        ("prefill-0", second["attempt"], "handed_over"),
        (found["decode_worker"], second["attempt"], "finished"),
    ]
    assert found["unattributed_seconds"] > 0.03, "what the dead worker would have said"


@pytest.mark.parametrize("phase", LIVE_PHASES)
def test_the_timeline_of_a_request_whose_client_left(phase: str) -> None:
    cluster = brought_to(phase)
    asked_at = cluster.answers[RequestId("r")].submitted
    cluster.leave(RequestId("r"))
    left_at = cluster.now
    for name in list(cluster.answers):
        cluster.leave(name)
    cluster.settle()
    found = timeline(cluster)
    assert found["phase"] == "aborted" and phase in found["coordinator_seconds"]
    check_times(found, left_at - asked_at)
    outcomes = {part["worker"]: part["outcome"] for part in found["workers"]}
    if phase == "waiting":
        assert outcomes == {} and found["tries"] == []
    elif phase in ("decode_ready", "decoding", "preempted"):
        assert outcomes == {"prefill-0": "handed_over", "decode-0": "aborted"}
    else:
        assert outcomes["prefill-0"] == "aborted"
    assert found["last_fault"] == ""


def test_the_timeline_of_a_request_that_failed() -> None:
    """Two workers die while they run it: who had it, and why it was given up."""
    cluster = StoryCluster(1, 3)
    answer = cluster.ask("r", drawn("r", 100), 200)
    victims = []
    for said in (10, 20):
        cluster.until(lambda s=said: len(answer.ids) >= s)  # type: ignore[misc]
        victims.append(timeline(cluster)["decode_worker"])
        cluster.kill(victims[-1], noticed=True)
    cluster.until_over(answer)
    ended_at = cluster.now
    cluster.settle()
    found = timeline(cluster)
    assert (found["phase"], found["attempts"], answer.end) == ("failed", 2, "RequestFailed")
    check_times(found, ended_at - answer.submitted)
    assert [one["decode_worker"] for one in found["tries"]] == victims
    assert found["tries"][0]["fault"] == f"{victims[0]} died"
    assert found["tries"][1]["fault"] == found["last_fault"] == answer.reason
    assert "2 workers were lost" in answer.reason


def test_as_many_timelines_are_kept_as_is_said() -> None:
    cluster = StoryCluster()
    for number in range(RECENT_LIMIT + 3):
        cluster.ask(f"r{number}", [1], 1)
        cluster.leave(RequestId(f"r{number}"))
    kept = [n for n in range(RECENT_LIMIT + 3) if cluster.cluster.timeline(RequestId(f"r{n}"), 9.0)]
    assert kept == list(range(3, RECENT_LIMIT + 3))
    cluster.settle()
