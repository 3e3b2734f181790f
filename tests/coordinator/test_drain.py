"""Draining a worker, as the coordinator does it. Its HTTP route: `test_departure_routes.py`."""

from __future__ import annotations

import pytest

from common.front_messages import RequestEnded
from common.messages import Abort, Drain, Ended, HeartbeatAck, Message, Prefill, Started
from common.request import Incarnation, WorkerId
from coordinator import admin_client
from coordinator.errors_http import Conflict
from tests.coordinator.cluster_bench import ClusterBench, heartbeat, request

P0 = WorkerId("p0")


def four() -> ClusterBench:
    return ClusterBench("p0", "p1", "d0", "d1")


def drain(bench: ClusterBench, name: str, deadline_s: float = 30.0) -> list[tuple[str, Message]]:
    effects = bench.cluster.departures.drain(WorkerId(name), deadline_s, bench.now)
    assert effects is not None
    return bench.note(effects)


def states(bench: ClusterBench) -> dict[str, str]:
    return {row["id"]: row["state"] for row in bench.cluster.registry.rows()}


def leave(bench: ClusterBench, name: str) -> list[tuple[str, Message]]:
    return bench.note(
        bench.cluster.worker_died(WorkerId(name), Incarnation(bench.incarnations[name]), bench.now)
    )


def test_it_shows_at_once_and_nothing_new_goes_there() -> None:
    bench = four()
    assert drain(bench, "p0", 12.0) == [("p0", Drain(12.0))]
    assert drain(bench, "d1", 12.0) == [("d1", Drain(12.0))]
    assert states(bench) == {"p0": "draining", "p1": "ready", "d0": "ready", "d1": "draining"}
    pairs = {bench.dispatched(name)[1:] for name in ("a", "b", "c")}
    assert pairs == {("p1", "d0")}


def test_a_lost_drain_is_said_again_until_a_heartbeat_shows_it() -> None:
    bench = four()
    drain(bench, "p0", 10.0)
    bench.now = 4.0
    ack = ("p0", HeartbeatAck(True))
    assert bench.say("p0", heartbeat()) == [ack, ("p0", Drain(6.0))]
    assert states(bench)["p0"] == "draining", "an older heartbeat takes nothing back"
    bench.now = 14.0
    assert bench.say("p0", heartbeat()) == [ack, ("p0", Drain(0.0))]
    assert bench.say("p0", heartbeat(draining=True)) == [ack]
    bench.join("p0")
    assert states(bench)["p0"] == "draining", "it registers again in the same life"
    bench.join("p0", incarnation=2)
    assert states(bench)["p0"] == "ready", "its next life is a new worker"


def test_asked_again_the_earlier_deadline_counts() -> None:
    bench = four()
    drain(bench, "p0", 10.0)
    assert drain(bench, "p0", 60.0) == [("p0", Drain(10.0))]
    assert drain(bench, "p0", 5.0) == [("p0", Drain(5.0))]


def test_unknown_and_lost_workers_cannot_be_drained() -> None:
    """And whoever would have a lost one in another role hears the same."""
    bench = four()
    departures = bench.cluster.departures
    assert departures.drain(WorkerId("p9"), 1.0, bench.now) is None

    def refusal() -> str:
        with pytest.raises(Conflict) as refused:
            departures.drain(P0, 1.0, bench.now)
        with pytest.raises(Conflict, match=f"^{refused.value.message}$") as of_role:
            departures.change_role(P0, "prefill", 1.0, bench.now)
        assert of_role.value.code == refused.value.code == "worker_lost"
        return refused.value.message

    leave(bench, "p0")
    assert refusal() == "Worker p0 is lost: ask again once it is back."
    bench.join("p0", incarnation=2)
    drain(bench, "p0")
    leave(bench, "p0")
    assert refusal() == "Worker p0 has left: ask again once it is back."
    bench.join("p0", incarnation=3)
    departures.change_role(P0, "decode", 1.0, bench.now)
    leave(bench, "p0")
    assert refusal() == "Worker p0 is expected back as decode-from-p0: ask for that one once it is here."
    bench.join("decode-from-p0", incarnation=4)
    assert refusal() == "Worker p0 is decode-from-p0 now."


def test_who_leaves_after_a_drain_is_not_counted_as_lost() -> None:
    bench = four()
    drain(bench, "p0")
    assert not any(row["left"] for row in bench.cluster.registry.rows())
    leave(bench, "p0")
    assert bench.cluster.counters.total("workers_lost_total") == 0
    assert states(bench)["p0"] == "lost" and "p0 left" in bench.cluster.notices[-1]
    leave(bench, "p1")
    assert bench.cluster.counters.total("workers_lost_total") == 1
    table = admin_client.workers_table(bench.cluster.registry.rows())
    shown = {cells[0]: cells[3:] for cells in zip(*(column.cells for column in table.columns), strict=True)}
    assert (shown["p0"], shown["p1"]) == (("left", *"––––––"), ("lost", *"––––––"))
    bench.join("p0", incarnation=2)
    assert not any(row["left"] for row in bench.cluster.registry.rows())


def test_a_request_survives_any_number_of_workers_that_leave_under_it() -> None:
    """Two deaths under one request make it poison; leaving is no death."""
    bench = ClusterBench("d0", "d1")
    bench.submit(request("a"))
    for life in range(2, 5):
        tracked = bench.cluster.tracker.all()[0]
        assert tracked.decode is not None
        worker = str(tracked.decode)
        bench.say(worker, Started(*tracked.key, "prefilling"))
        drain(bench, worker)
        leave(bench, worker)
        bench.join(worker, incarnation=life)
    assert not [m for m in bench.fronts if isinstance(m, RequestEnded)]
    assert bench.cluster.tracker.all()[0].deaths == 0


def test_what_is_left_at_the_deadline_goes_on_elsewhere() -> None:
    bench = four()
    key, _, decode = bench.decoding(tokens_out=3)
    drain(bench, decode)
    told = bench.say(decode, Ended(*key, outcome="aborted", reason="the worker shuts down"))
    (again,) = [m for _, m in told if isinstance(m, Prefill)]
    assert again.attempt > key[1] and again.target is not None and again.target.worker != decode
    assert [m for _, m in told if isinstance(m, Abort)], "the old attempt is fenced"
