"""A worker that changes its role, as the coordinator does it. Its HTTP route: `test_departure_routes.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.messages import Ended, HeartbeatAck, Message, Prefill, Role, SetRole, Started
from common.request import Incarnation, WorkerId
from coordinator import admin_client
from coordinator.errors_http import Conflict
from coordinator.registry import COMES_BACK_WITHIN_S
from tests.coordinator.cluster_bench import ClusterBench, heartbeat

NEW = "prefill-from-d1"


def four() -> ClusterBench:
    return ClusterBench("p0", "p1", "d0", "d1")


def change(bench: ClusterBench, name: str, role: Role, deadline_s: float = 30.0) -> list[tuple[str, Message]]:
    effects = bench.cluster.departures.change_role(WorkerId(name), role, deadline_s, bench.now)
    assert effects is not None
    return bench.note(effects)


def rows(bench: ClusterBench) -> dict[str, tuple[str, str, str | None]]:
    return {row["id"]: (row["role"], row["state"], row["becomes"]) for row in bench.cluster.registry.rows()}


def leave(bench: ClusterBench, name: str) -> list[tuple[str, Message]]:
    return bench.note(
        bench.cluster.worker_died(WorkerId(name), Incarnation(bench.incarnations[name]), bench.now)
    )


def test_it_drains_leaves_and_comes_back_under_its_other_id() -> None:
    bench = four()
    assert change(bench, "d1", "prefill", 12.0) == [("d1", SetRole("prefill", 12.0))]
    assert rows(bench)["d1"] == ("decode", "draining", "prefill")
    assert {bench.dispatched(name)[2] for name in ("a", "b", "c")} == {"d0"}, "nothing new goes there"
    leave(bench, "d1")
    assert rows(bench)["d1"] == ("decode", "starting", "prefill")
    bench.join(NEW, incarnation=2)
    assert rows(bench).keys() == {"p0", "p1", "d0", NEW}, "it is there once"
    assert rows(bench)[NEW] == ("prefill", "ready", None)
    assert NEW in {bench.dispatched(name)[1] for name in ("e", "f", "g")}, "it computes prompts"
    counters = bench.cluster.counters
    assert counters.values['role_changes_total{role="prefill"}'] == 1
    assert counters.total("workers_lost_total") == 0

    change(bench, NEW, "decode")
    leave(bench, NEW)
    bench.join("d1", incarnation=3)
    assert rows(bench).keys() == {"p0", "p1", "d0", "d1"}
    assert rows(bench)["d1"] == ("decode", "ready", None)
    assert counters.total("role_changes_total") == 2


def test_what_its_lives_counted_is_still_counted() -> None:
    bench = four()
    bench.say("d1", heartbeat(num_preemptions_total=5.0))
    change(bench, "d1", "prefill")
    leave(bench, "d1")
    bench.join(NEW, incarnation=2)
    before = bench.cluster.registry.get(WorkerId("d1"))
    assert before is not None and before.role == "decode"
    assert before.totals() == {"num_preemptions_total": 5.0}


def test_where_nobody_watches_its_process_its_new_life_ends_the_old_one() -> None:
    """It goes on under the same process id, so its end is not seen."""
    bench = four()
    key, _, decode = bench.decoding(tokens_out=3)
    other = "d1" if decode == "d0" else "d0"
    change(bench, decode, "prefill")
    told = bench.join(f"prefill-from-{decode}", incarnation=2)
    (again,) = [m for _, m in told if isinstance(m, Prefill)]
    assert again.attempt > key[1] and again.target is not None and again.target.worker == other
    assert decode not in rows(bench)
    assert bench.cluster.counters.total("workers_lost_total") == 0


def test_a_coordinator_that_was_restarted_amid_the_change_shows_it_once_too() -> None:
    bench = four()
    bench.say("d1", heartbeat(draining=True))
    bench.join(NEW, incarnation=2)
    assert "d1" not in rows(bench) and rows(bench)[NEW] == ("prefill", "ready", None)


def test_a_lost_command_is_said_again_until_a_heartbeat_shows_it() -> None:
    bench = four()
    change(bench, "d1", "prefill", 10.0)
    bench.now = 4.0
    ack = ("d1", HeartbeatAck(True))
    assert bench.say("d1", heartbeat()) == [ack, ("d1", SetRole("prefill", 6.0))]
    bench.join("d1")
    assert rows(bench)["d1"] == ("decode", "draining", "prefill"), "it registers again in the same life"
    assert bench.say("d1", heartbeat(draining=True)) == [ack]


def test_a_death_amid_the_drain_calls_it_off() -> None:
    """Whoever starts it again does so in the role that it had."""
    bench = four()
    change(bench, "d1", "prefill")
    leave(bench, "d1")
    bench.join("d1", incarnation=2)
    assert rows(bench)["d1"] == ("decode", "ready", None)
    assert change(bench, "d1", "prefill", 3.0) == [("d1", SetRole("prefill", 3.0))]


def test_who_does_not_come_back_is_lost_after_a_while() -> None:
    bench = four()
    change(bench, "d1", "prefill")
    leave(bench, "d1")
    bench.turn(at=COMES_BACK_WITHIN_S - 1.0)
    assert rows(bench)["d1"] == ("decode", "starting", "prefill")
    bench.turn(at=COMES_BACK_WITHIN_S + 1.0)
    assert rows(bench)["d1"] == ("decode", "lost", None)


def test_who_falls_silent_and_never_said_that_it_drains_is_lost_and_overdue_then() -> None:
    """A process that is stopped. Whoever started it kills it: only then it is on its way."""
    bench = four()
    change(bench, "d1", "prefill", 20.0)

    def at(now: float) -> tuple[tuple[str, str, str | None], bool, bool]:
        while bench.now < now:
            bench.now += 1.0
            for name in ("p0", "p1", "d0"):
                bench.say(name, heartbeat())
            bench.turn()
        (row,) = [row for row in bench.cluster.registry.rows() if row["id"] == "d1"]
        return rows(bench)["d1"], row["left"], row["overdue"]

    assert at(2.0) == (("decode", "draining", "prefill"), False, False)
    for now in (4.0, 20.0):
        assert at(now) == (("decode", "lost", "prefill"), False, False)
    assert "never" in bench.cluster.notices[-1]
    assert bench.cluster.counters.total("workers_lost_total") == 1
    for now in (21.0, 22.0):
        assert at(now) == (("decode", "lost", "prefill"), False, True)
    assert len([notice for notice in bench.cluster.notices if "it hangs, process 1 on h" in notice]) == 1
    leave(bench, "d1")
    assert at(23.0) == (("decode", "starting", "prefill"), True, False)
    bench.join(NEW, incarnation=2)
    assert rows(bench)[NEW] == ("prefill", "ready", None) and "d1" not in rows(bench)


def test_who_drains_and_is_silent_then_has_left_as_far_as_anybody_knows() -> None:
    """A worker on another machine, say, that loads its model; but not for longer than a step may take."""
    bench = ClusterBench("d0")
    bench.cluster.departures.drain(WorkerId("d0"), 5.0, bench.now)
    bench.say("d0", heartbeat(draining=True))
    overdue = []
    for now in (4.0, 64.0, 66.0):
        bench.turn(at=now)
        assert bench.cluster.next_deadline(now) == (now + 0.5 if now < 65.0 else None)
        overdue.append(bench.cluster.registry.rows()[0]["overdue"])
    assert overdue == [False, False, True] and bench.cluster.registry.rows()[0]["left"]


def test_asked_again_the_earlier_deadline_counts() -> None:
    bench = four()
    change(bench, "d1", "prefill", 10.0)
    assert change(bench, "d1", "prefill", 60.0) == [("d1", SetRole("prefill", 10.0))]
    assert change(bench, "d1", "prefill", 5.0) == [("d1", SetRole("prefill", 5.0))]
    drain = bench.cluster.departures.drain(WorkerId("d1"), 2.0, bench.now)
    assert drain is not None and bench.note(drain) == [("d1", SetRole("prefill", 2.0))]
    leave(bench, "d1")
    assert change(bench, "d1", "prefill") == [], "it is on its way"


def test_in_the_role_that_it_has_nothing_is_done() -> None:
    bench = four()
    assert change(bench, "d1", "decode") == change(bench, "p0", "prefill") == []
    assert {state for _, state, _ in rows(bench).values()} == {"ready"}


def drained(bench: ClusterBench) -> None:
    bench.cluster.departures.drain(WorkerId("d1"), 30.0, bench.now)


def told_to_leave(bench: ClusterBench) -> None:
    bench.say("d1", heartbeat(draining=True))


def on_its_way(bench: ClusterBench) -> None:
    change(bench, "d1", "prefill")


def changed(bench: ClusterBench) -> None:
    on_its_way(bench)
    leave(bench, "d1")
    bench.join(NEW, incarnation=2)


def lost(bench: ClusterBench) -> None:
    leave(bench, "d1")


def alone(bench: ClusterBench) -> None:
    leave(bench, "d0")


def beside_one_that_drains(bench: ClusterBench) -> None:
    bench.cluster.departures.drain(WorkerId("d0"), 30.0, bench.now)


def beside_one_that_changes(bench: ClusterBench) -> None:
    change(bench, "d0", "prefill")


@pytest.mark.parametrize(
    ("before", "role", "code", "words"),
    [
        (drained, "prefill", "worker_draining", "about to leave"),
        (told_to_leave, "prefill", "worker_draining", "about to leave"),
        (on_its_way, "decode", "worker_draining", "on its way to the prefill role"),
        (changed, "prefill", "worker_lost", f"is {NEW} now"),
        (changed, "decode", "worker_lost", f"is {NEW} now"),
        (lost, "prefill", "worker_lost", "is lost"),
        (lost, "decode", "worker_lost", "is lost"),
        (alone, "prefill", "last_decode_worker", "start another one"),
        (beside_one_that_drains, "prefill", "last_decode_worker", "the only decode worker"),
        (beside_one_that_changes, "prefill", "last_decode_worker", "the only decode worker"),
    ],
)
def test_what_cannot_be_done_now_is_refused_and_changes_nothing(
    before: Callable[[ClusterBench], None], role: Role, code: str, words: str
) -> None:
    bench = four()
    before(bench)
    was = rows(bench)
    with pytest.raises(Conflict) as refused:
        change(bench, "d1", role)
    assert (refused.value.status, refused.value.code) == (409, code)
    assert words in refused.value.message
    assert rows(bench) == was


def test_nobody_is_known_by_that_name() -> None:
    assert four().cluster.departures.change_role(WorkerId("d9"), "prefill", 1.0, 0.0) is None


def test_without_the_last_prefill_worker_decode_workers_compute_prompts_by_order() -> None:
    bench = ClusterBench("p0", "d0")
    departures = bench.cluster.departures
    change(bench, "p0", "decode")
    assert departures.no_prefill_wanted
    leave(bench, "p0")
    bench.join("decode-from-p0", incarnation=2)
    assert departures.no_prefill_wanted
    change(bench, "decode-from-p0", "prefill")
    leave(bench, "decode-from-p0")
    bench.join("p0", incarnation=3)
    assert not departures.no_prefill_wanted
    bench.join("p1")
    change(bench, "p1", "decode")
    assert not departures.no_prefill_wanted, "another one is there"


def test_what_is_left_at_the_deadline_goes_on_elsewhere() -> None:
    bench = four()
    key, _, decode = bench.decoding(tokens_out=3)
    change(bench, decode, "prefill", 0.0)
    told = bench.say(decode, Ended(*key, outcome="aborted", reason="the worker shuts down"))
    (again,) = [m for _, m in told if isinstance(m, Prefill)]
    assert again.target is not None and again.target.worker != decode


def test_a_prompt_under_way_to_it_goes_to_another_decode_worker() -> None:
    bench = four()
    key, prefill, decode = bench.accepted()
    change(bench, decode, "prefill")
    leave(bench, decode)
    bench.say(prefill, Started(*key, "prefilling"))
    assert bench.cluster.tracker.all()[0].decode not in (None, decode)


def test_the_table_of_workers_says_it() -> None:
    bench = four()
    change(bench, "d1", "prefill")
    table = admin_client.workers_table(bench.cluster.registry.rows())
    states = next(list(column.cells) for column in table.columns if column.header == "state")
    assert sorted(map(str, states)) == ["draining, becomes prefill", "ready", "ready", "ready"]
    leave(bench, "d1")
    table = admin_client.workers_table(bench.cluster.registry.rows())
    row = next(cells for cells in zip(*(c.cells for c in table.columns), strict=True) if cells[0] == "d1")
    assert row[3:] == ("starting, becomes prefill", *"––––––")
