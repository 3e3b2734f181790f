"""Told to leave under twenty long streams: BR-140 in virtual time, for each kind of process, limit or not.

Over real processes: tests/e2e/test_pools.py and tests/e2e/test_service.py.
"""

from __future__ import annotations

import pytest

from bench.virtual_cluster import Answer
from bench.virtual_model import continuation
from common.request import WorkerId
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

TOKENS = 600  # about eight seconds
PROMPTS = [drawn(f"p{number}", 40 + 13 * number) for number in range(20)]


def twenty_streams(cluster: StoryCluster) -> list[Answer]:
    """All of them have their first token."""
    answers = [cluster.ask(f"r{number}", prompt, TOKENS) for number, prompt in enumerate(PROMPTS)]
    cluster.until(lambda: all(answer.ids for answer in answers))
    return answers


@pytest.mark.parametrize("deadline_s", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_BR_140_a_worker_that_is_told_to_leave_costs_its_streams_nothing(
    worker: str, deadline_s: float
) -> None:
    """What it has not ended by then goes on elsewhere, from where it was."""
    cluster = StoryCluster(prefill=2, decode=2)
    answers = twenty_streams(cluster)
    cluster.terminate(worker, deadline_s)
    began = cluster.now
    while cluster.loops[WorkerId(worker)].alive:
        cluster.go(0.05)
        assert cluster.now - began < deadline_s + 0.2 or deadline_s == 60.0, "it overstays its limit"
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        check_exact(answer, prompt, TOKENS)
    assert cluster.counted("workers_lost_total") == 0, "who leaves when told is not lost"
    if worker == "decode-0":  # a prefill worker may be at its last hand-over
        assert (cluster.counted("requests_migrated_total") > 0) == (deadline_s < 60.0)
    cluster.settle()


@pytest.mark.parametrize("deadline_s", [0.0, 1.0, 60.0])
def test_BR_140_a_coordinator_that_is_told_to_leave_ends_what_is_left_with_an_error(
    deadline_s: float,
) -> None:
    """And takes nothing new meanwhile. The next one finds its workers, and they hold nothing of before."""
    cluster = StoryCluster(prefill=2, decode=2)
    answers = twenty_streams(cluster)
    cluster.terminate_coordinator(deadline_s)
    late = cluster.ask("late", PROMPTS[0])
    assert late.end == ("NoWorker" if cluster.coordinator_up else "refused")
    began = cluster.now
    cluster.until(lambda: not cluster.coordinator_up)
    assert cluster.now - began <= deadline_s + 0.1
    ends = {answer.end for answer in answers}
    assert ends == ({"length"} if deadline_s == 60.0 else {"NoWorker"})
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert answer.ids == continuation(prompt, TOKENS)[: len(answer.ids)]
    cluster.start_coordinator()
    cluster.go(4.0)
    after = cluster.ask("after", PROMPTS[1])
    cluster.until_over(after)
    check_exact(after, PROMPTS[1])
    cluster.settle()
