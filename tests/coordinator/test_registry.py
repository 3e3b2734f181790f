"""The registry: who is here, who is gone, and totals that never step back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.counters import HISTOGRAM_BUCKETS
from common.messages import Registered, RegistrationRefused, Sender
from common.request import Incarnation, WorkerId
from coordinator.registry import MAX_COUNTERS, Registry, Worker
from tests.coordinator.cluster_bench import card, heartbeat

D0 = WorkerId("d0")


def me(name: str = "d0", incarnation: int = 1) -> Sender:
    return Sender(name, Incarnation(incarnation))


def registry(**settings: float) -> Registry:
    return Registry(tokenizer_hash="t", fronts={"f": "tcp://h:1"}, **settings)  # type: ignore[arg-type]


def worker(where: Registry) -> Worker:
    found = where.get(D0)
    assert found is not None
    return found


def test_registered_is_told_limit_interval_and_fronts() -> None:
    here = registry(max_model_len=100)
    assert here.register(card("d0"), me(), 0.0) == Registered(100, 0.5, {"f": "tcp://h:1"})
    assert [w.state for w in here.all()] == ["ready"]


@pytest.mark.parametrize(
    "changes, field",
    [({"dtype": "float16"}, "dtype"), ({"tokenizer": "x"}, "tokenizer"), ({"new": "1"}, "new")],
)
def test_BR_146_kv_passes_between_equals_only(changes: dict[str, str], field: str) -> None:
    here = registry()
    here.register(card("p0"), me("p0"), 0.0)
    answer = here.register(card("d0", **changes), me(), 0.0)  # type: ignore[arg-type]
    assert isinstance(answer, RegistrationRefused) and answer.field == field
    assert here.get(D0) is None


def test_whole_batches_are_formed_where_there_is_no_prefill_worker() -> None:
    whole = replace(card("d0"), whole_batches=True)
    here = registry()
    here.register(card("p0"), me("p0"), 0.0)
    refused = RegistrationRefused("batching", "continuous (prefill)", "dynamic (decode)")
    assert here.register(whole, me(), 0.0) == refused
    here = registry()
    here.register(whole, me(), 0.0)
    refused = RegistrationRefused("batching", "dynamic (decode)", "continuous (prefill)")
    assert here.register(card("p0"), me("p0"), 0.0) == refused
    assert isinstance(here.register(card("d1"), me("d1"), 0.0), Registered)


def test_BR_148_the_first_worker_is_held_against_the_coordinators_tokenizer() -> None:
    answer = registry().register(card("d0", tokenizer="x"), me(), 0.0)
    assert answer == RegistrationRefused("tokenizer", "t", "x")


def test_BR_148_the_first_worker_must_have_every_id_that_the_coordinator_may_send() -> None:
    """Two models may share a tokenizer and not the size of their tables."""
    here = Registry(tokenizer_hash="t", vocab_size=49152, fronts={})
    answer = here.register(card("d0", vocab_size="49000"), me(), 0.0)
    assert answer == RegistrationRefused("vocab_size", "49152", "49000")


def test_a_worker_that_no_kv_could_reach_is_refused_at_the_door() -> None:
    here = registry()
    here.register(replace(card("p0"), channels=("shm",)), me("p0"), 0.0)
    answer = here.register(card("d0"), me(), 0.0)
    assert answer == RegistrationRefused("transfer", "shm", "tcp")
    for name, channels in (("d0", ("shm", "tcp")), ("p1", ("tcp",))):  # of its own role anything goes
        assert isinstance(here.register(replace(card(name), channels=channels), me(name), 0.0), Registered)


def test_a_lost_workers_fingerprint_binds_nobody() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    here.expire(10.0)
    assert isinstance(here.register(card("d1", dtype="float16"), me("d1"), 10.0), Registered)


def test_lost_after_silence_and_not_before() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    here.heartbeat(heartbeat(), me(), 1.0)
    assert here.expire(4.0) == []
    assert [w.id for w in here.expire(4.1)] == ["d0"] and here.expire(4.2) == []
    assert worker(here).state == "lost" and here.usable("decode") == [] and here.max_model_len() is None
    assert not here.heartbeat(heartbeat(), me(), 4.3), "must register again"
    here.register(card("d0"), me(), 4.4)
    assert here.heartbeat(heartbeat(), me(), 4.5) and worker(here).state == "ready"


def test_who_slept_itself_takes_nobody_for_lost_at_once() -> None:
    """The coordinator was stopped for a minute: the heartbeats of that minute are unread, not missing."""
    here = registry()
    here.register(card("d0"), me(), 0.0)
    assert here.expire(0.5) == [] and here.expire(60.0) == []
    for tick in range(1, 12):
        assert here.expire(60.0 + tick / 4) == []
    assert [w.id for w in here.expire(63.1)] == ["d0"], "still silent after the whole time: lost"


def test_lost_when_the_model_thread_hangs() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    here.heartbeat(heartbeat(progress_age_s=60.5), me(), 1.0)
    assert [w.id for w in here.expire(1.0)] == ["d0"]
    # It lives, hears that nobody knows it, and registers: that does not make it usable.
    for now in (1.5, 2.0):
        assert here.heartbeat(heartbeat(progress_age_s=60.0 + now), me(), now) is None
        here.register(card("d0"), me(), now)
        assert here.usable("decode") == [] and worker(here).state == "lost"
    assert here.heartbeat(heartbeat(progress_age_s=0.1), me(), 2.5) is None
    here.register(card("d0"), me(), 2.5)
    assert here.heartbeat(heartbeat(), me(), 3.0) and worker(here).state == "ready", "the step has ended"


def test_who_drains_and_hangs_is_overdue_once_however_often_it_registers() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    here.drain(worker(here), 10.0)
    here.heartbeat(heartbeat(draining=True), me(), 1.0)
    here.heartbeat(heartbeat(draining=True, progress_age_s=60.5), me(), 2.0)
    assert [w.id for w in here.expire(2.0)] == ["d0"]
    found = []
    for now in range(3, 100):
        here.register(card("d0"), me(), now)
        assert here.heartbeat(heartbeat(draining=True, progress_age_s=60.0 + now), me(), now) is None
        assert worker(here).left, "it said that it drains"
        found += [now for _ in here.overdue(now)]
    assert found == [71], "a step's time after the deadline"


def test_a_draining_worker_lives_and_gets_nothing() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    here.heartbeat(heartbeat(draining=True), me(), 1.0)
    assert here.usable("decode") == [] and [w.state for w in here.live("decode")] == ["draining"]


def test_heartbeats_of_strangers_and_old_lives_are_not_taken() -> None:
    here = registry()
    assert not here.heartbeat(heartbeat(), me(), 0.0)
    here.register(card("d0", 2), me(incarnation=2), 0.0)
    assert not here.heartbeat(heartbeat(x_total=9.0), me(incarnation=1), 1.0)
    assert worker(here).totals() == {}


def test_totals_never_step_back() -> None:
    """Over registrations, incarnations, and heartbeats that come in the wrong order."""
    here = registry()
    seen = [0.0]

    def check(expected: float) -> None:
        total = worker(here).totals().get("x_total", 0.0)
        assert total == expected and total >= seen[-1]
        seen.append(total)

    here.register(card("d0"), me(), 0.0)
    here.heartbeat(heartbeat(x_total=5.0), me(), 1.0)
    check(5.0)
    here.heartbeat(heartbeat(x_total=4.0), me(), 1.1)
    check(5.0)
    here.register(card("d0"), me(), 2.0)
    check(5.0)
    here.heartbeat(heartbeat(x_total=7.0), me(), 2.5)
    check(7.0)
    here.register(card("d0", 2), me(incarnation=2), 3.0)
    check(7.0)
    here.heartbeat(heartbeat(x_total=1.0), me(incarnation=2), 3.5)
    check(8.0)


def test_histograms_add_up_and_strange_ones_are_left_out() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    width = len(HISTOGRAM_BUCKETS["step_seconds"]) + 3
    row = (2.0, 4.0, *[0.0] * (width - 3), 4.0)
    older = (1.0, 2.0, *[0.0] * (width - 3), 2.0)
    for number, histograms in enumerate(({"step_seconds": row, "nonsense": (1.0,)}, {"step_seconds": older})):
        here.heartbeat(replace(heartbeat(), histograms=histograms), me(), 1.0 + number)
    assert worker(here).histogram_totals() == {"step_seconds": row}
    here.heartbeat(replace(heartbeat(), histograms={"step_seconds": (1.0,)}), me(), 3.0)
    here.register(card("d0", 2), me(incarnation=2), 4.0)
    here.heartbeat(replace(heartbeat(), histograms={"step_seconds": row}), me(incarnation=2), 5.0)
    assert worker(here).histogram_totals()["step_seconds"][:2] == (4.0, 8.0)


def test_the_table_is_bounded_and_the_lost_leave_first() -> None:
    here = registry(max_workers=3)
    for number in range(6):
        here.register(card(f"d{number}"), me(f"d{number}"), float(number))
        if number < 4:
            here.mark_lost(here.all()[-1])
    assert [w.id for w in here.all()] == ["d3", "d4", "d5"]


def test_rows_for_the_admin_page() -> None:
    here = registry()
    here.register(card("d0"), me(), 0.0)
    (row,) = here.rows()
    names = {
        "id",
        "role",
        "pid",
        "host",
        "address",
        "state",
        "running",
        "waiting",
        "blocks_total",
        "blocks_free",
        "step_ms",
    }
    assert names <= set(row) and row["state"] == "ready" and row["id"] == "d0"


def test_no_more_workers_than_the_table_holds_and_who_was_here_may_come_back() -> None:
    here = registry(max_workers=2)
    for name in ("d0", "d1"):
        assert isinstance(here.register(card(name), me(name), 0.0), Registered)
    answer = here.register(card("d2"), me("d2"), 0.0)
    assert answer == RegistrationRefused("number of workers", "2", "one more") and len(here.all()) == 2
    assert isinstance(here.register(card("d1"), me("d1", 2), 0.0), Registered)
    here.mark_lost(worker(here))
    assert isinstance(here.register(card("d2"), me("d2"), 0.0), Registered)


def test_what_a_worker_counts_is_kept_where_it_is_a_counter_and_up_to_a_bound() -> None:
    """It is shown to whoever collects metrics, so it must not bring lines of its own there."""
    here = registry()
    here.register(card("d0"), me(), 0.0)
    good = 'late_messages_total{kind="Offer",of="x"}'
    bad = ('a_total{kind="x\ny"}', 'a_total{kind="x"', "A total", "", 'a_total{kind="}"}', "a" * 99)
    here.heartbeat(replace(heartbeat(), counters={good: 1.0, **dict.fromkeys(bad, 1.0)}), me(), 0.1)
    assert worker(here).counters == {good: 1.0}
    for start in (0, 400):
        many = {f"n{chr(97 + n // 26 % 26)}{chr(97 + n % 26)}_total": 1.0 for n in range(start, start + 400)}
        here.heartbeat(replace(heartbeat(), counters=many), me(), 0.2)
    assert len(worker(here).counters) == MAX_COUNTERS
    here.heartbeat(replace(heartbeat(), counters={good: 7.0}), me(), 0.3)
    assert worker(here).counters[good] == 7.0, "a full table still counts"


def test_a_worker_that_knows_its_steps_too_little_is_taken_to_be_as_fast_as_one_of_its_role_that_knows() -> (
    None
):
    """Else nobody is promised anything beside a worker that has just started, or that light load never reaches."""
    here = registry()
    for name in ("p0", "p1", "d0"):
        here.register(card(name), me(name), 0.0)
        here.heartbeat(heartbeat(), me(name), 0.0)
    model = (0.01, 0.001, 0.0, 0.0001)
    here.heartbeat(heartbeat(step_model=model), me("p0"), 1.0)
    for name in ("p1", "d0"):
        here.heartbeat(heartbeat(), me(name), 1.0)
    said = {worker.id: worker.load.step_model for worker in here.all()}
    assert said == {"p0": model, "p1": model, "d0": ()}
    own = (0.02, 0.001, 0.0, 0.0002)
    here.heartbeat(heartbeat(step_model=own), me("p1"), 2.0)
    here.heartbeat(heartbeat(step_model=model), me("p0"), 2.0)
    assert [worker.load.step_model for worker in here.all()][:2] == [model, own]
