"""Workers that change their role under load in virtual time: no request fails, all are exact, they serve after it."""

from __future__ import annotations

import pytest

from bench.virtual_cluster import COMES_BACK_AFTER_S, Answer
from bench.virtual_network import COORDINATOR, Parcel
from common.messages import Drain, Message, Role, Sender, SetRole
from common.request import Incarnation, WorkerId
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

TOKENS = 300
PROMPTS = [drawn(f"p{number}", 40 + 13 * number) for number in range(20)]
NEW = WorkerId("prefill-from-decode-1")


def streams(cluster: StoryCluster, name: str) -> list[Answer]:
    """Twenty, all of which have their first token."""
    answers = [cluster.ask(f"{name}{number}", prompt, TOKENS) for number, prompt in enumerate(PROMPTS)]
    cluster.until(lambda: all(answer.ids for answer in answers))
    return answers


def states(cluster: StoryCluster) -> dict[str, tuple[str, str]]:
    return {row["id"]: (row["role"], row["state"]) for row in cluster.cluster.registry.rows()}


def check_all(cluster: StoryCluster, answers: list[Answer]) -> None:
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        check_exact(answer, prompt, TOKENS)


def prompts_computed_at(cluster: StoryCluster, worker: str) -> int:
    """Of the requests that have ended, for the most part."""
    timelines = (cluster.cluster.timeline(name, cluster.now) for name in cluster.answers)
    return sum(timeline is not None and timeline["prefill_worker"] == worker for timeline in timelines)


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("deadline_s", [0.0, 1.0, 60.0])
def test_a_decode_worker_becomes_a_prefill_worker_and_goes_back_amid_streams(
    deadline_s: float, lost: int
) -> None:
    """`lost`: how many of the commands do not arrive."""
    cluster = StoryCluster(prefill=1, decode=2)
    left = [lost]

    def loses(message: Message) -> float | None:
        if isinstance(message, SetRole) and left[0]:
            left[0] -= 1
            return None
        return 0.0

    cluster.fate = loses
    running = streams(cluster, "a")
    cluster.set_role("decode-1", "prefill", deadline_s)
    cluster.until(lambda: states(cluster).get(NEW) == ("prefill", "ready"))
    assert left == [0] and "decode-1" not in states(cluster)
    check_all(cluster, running)
    assert (cluster.counted("requests_migrated_total") == 0) == (deadline_s == 60.0)

    check_all(cluster, streams(cluster, "b"))
    assert prompts_computed_at(cluster, NEW) > 0, "it computes prompts"
    running = streams(cluster, "c")
    cluster.set_role(NEW, "decode", deadline_s)
    cluster.until(lambda: states(cluster).get("decode-1") == ("decode", "ready"))
    check_all(cluster, running)
    check_all(cluster, streams(cluster, "d"))
    assert cluster.counted("workers_lost_total") == 0 and cluster.counted("role_changes_total") == 2
    cluster.settle()


@pytest.mark.parametrize(("worker", "role"), [("decode-1", "prefill"), ("prefill-1", "decode")])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_death_amid_the_change_costs_the_streams_nothing_and_calls_it_off(
    worker: str, role: Role, noticed: bool
) -> None:
    cluster = StoryCluster(prefill=2, decode=2)
    running = streams(cluster, "a")
    cluster.set_role(worker, role, 60.0)
    cluster.go(0.3)
    before = states(cluster)[worker]
    assert before[1] in ("draining", "starting")
    cluster.kill(worker, noticed=noticed)
    cluster.go(1.0)
    cluster.restart(worker)
    check_all(cluster, running)
    cluster.go(COMES_BACK_AFTER_S + 1.0)
    assert states(cluster)[worker] == (before[0], "ready"), "in the role that it had"
    check_all(cluster, streams(cluster, "b"))
    cluster.settle()


def test_the_last_prefill_worker_may_become_a_decode_worker() -> None:
    """Then decode workers compute prompts themselves."""
    cluster = StoryCluster(prefill=1, decode=1)
    running = streams(cluster, "a")
    cluster.set_role("prefill-0", "decode", 60.0)
    check_all(cluster, running)
    cluster.until(lambda: states(cluster).get("decode-from-prefill-0") == ("decode", "ready"))
    check_all(cluster, streams(cluster, "b"))
    timelines = [cluster.cluster.timeline(name, cluster.now) for name in list(cluster.answers)[20:]]
    assert {timeline["prefill_worker"] for timeline in timelines if timeline} == {None}
    assert len({timeline["decode_worker"] for timeline in timelines if timeline}) == 2
    cluster.settle()


def test_what_comes_late_for_who_it_was_is_not_heard() -> None:
    """Its socket is gone with its old process."""
    cluster = StoryCluster(prefill=1, decode=2)
    cluster.set_role("decode-1", "prefill", 0.0)
    cluster.until(lambda: states(cluster).get(NEW) == ("prefill", "ready"))
    me = Sender(COORDINATOR, Incarnation(1))
    cluster.network.send(Parcel(COORDINATOR, "decode-1", Drain(0.0), me))
    cluster.go(5.0)
    assert states(cluster)[NEW] == ("prefill", "ready")
    cluster.settle()
