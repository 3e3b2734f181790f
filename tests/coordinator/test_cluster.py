"""The coordinator by what it hears: dispatch, answers, losses, limits, reconciliation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.effects import ToWorker
from common.errors import HTTP_ERRORS
from common.front_messages import (
    Admitted,
    CancelRequest,
    Progress,
    Rejected,
    RequestEnded,
    RequestFinished,
    StopRequest,
)
from common.messages import (
    Abort,
    Accepted,
    Decode,
    Ended,
    HeartbeatAck,
    Later,
    Message,
    Prefill,
    PromptRow,
    Rebind,
    Refused,
    Registered,
    RegistrationRefused,
    Started,
    Stop,
    TokenRow,
    Tokens,
)
from common.request import Attempt, Incarnation, Key, RequestId, TokenLogprobs, WorkerId, pack_ids
from coordinator.attempts import MAX_ASKS, MAX_FRUITLESS
from coordinator.dispatcher import MAX_BLOCKED, MAX_PASSES
from coordinator.placing import Placing
from coordinator.tracker import Tracked
from tests.coordinator.cluster_bench import ClusterBench, address, card, heartbeat, request

A = RequestId("a")


def pair() -> ClusterBench:
    return ClusterBench("p0", "d0")


def four() -> ClusterBench:
    return ClusterBench("p0", "p1", "d0", "d1")


def kinds(told: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(worker, type(message).__name__) for worker, message in told]


def failure(bench: ClusterBench) -> RequestEnded:
    (ended,) = [m for m in bench.fronts if isinstance(m, RequestEnded)]
    assert ended.error in HTTP_ERRORS, "the front must be able to raise it"
    return ended


# ---------------------------------------------------------------- the good path


def test_story_of_a_request() -> None:
    """1 admitted, dispatched  2 accepted  3 first chunk  4 first token  5 owned by the decode worker  6 more
    tokens  7 the last, as the front says, and nothing of it takes a share of anybody."""
    bench = pair()
    key, prefill, decode = bench.dispatched()
    assert bench.fronts == [Admitted(A)] and bench.phase() == "queued"
    bench.say(prefill, Accepted(*key, address(decode)))
    bench.say(prefill, Started(*key, "prefilling"))
    assert bench.phase() == "prefilling"
    bench.front(Progress(((A, 0, (1,)),)))
    assert bench.phase() == "kv_ready"
    bench.say(decode, Started(*key, "decode_ready"))
    assert bench.phase() == "decode_ready"
    bench.say(prefill, Ended(*key, outcome="handed_over", blocks=2))
    bench.front(Progress(((A, 1, (2, 3, 4, 5)),)))
    assert bench.phase() == "decoding"
    bench.front(RequestFinished(A, "length"))
    bench.say(decode, Ended(*key, outcome="finished", transferred_bytes=200, cached_tokens=16))
    timeline = bench.cluster.timeline(A, bench.now)
    assert timeline is not None
    told = {k: timeline[k] for k in ("phase", "attempts", "prompt_tokens", "output_tokens")}
    assert told == {"phase": "finished", "attempts": 1, "prompt_tokens": 20, "output_tokens": 5}
    assert (timeline["blocks"], timeline["transferred_bytes"], timeline["cached_tokens"]) == (2, 200, 16)
    first = {"number": 1, "attempt": str(key[1]), "prefill_worker": "p0", "decode_worker": "d0", "fault": ""}
    assert timeline["tries"] == [first], "the fencing number is above 2^53: no number for readers of JSON"
    assert {part["attempt"] for part in timeline["workers"]} == {str(key[1])}
    assert bench.told == [(prefill, bench.told[0][1])], "one command was enough"
    bench.check_settled()


def test_attempts_rise_with_every_dispatch_and_every_epoch() -> None:
    bench = pair()
    keys = [bench.dispatched(name)[0] for name in ("a", "b")]
    assert [key[1] for key in keys] == [(1 << 32) + 1, (1 << 32) + 2]
    later = ClusterBench("p0", "d0", epoch=2)
    assert later.dispatched()[0][1] > max(key[1] for key in keys)


def test_without_a_prefill_worker_the_decode_worker_does_both() -> None:
    bench = ClusterBench("d0")
    ((worker, command),) = bench.submit(request("a"))
    assert worker == "d0" and isinstance(command, Decode)
    bench.say("d0", Accepted(*command.key))
    bench.say("d0", Started(*command.key, "prefilling"))
    assert bench.phase() == "prefilling"
    bench.front(Progress(((A, 0, (1,)),)))
    assert bench.phase() == "decoding"
    bench.front(RequestFinished(A, "length"))
    bench.check_settled()


def test_least_loaded_pair() -> None:
    bench = four()
    pairs = [bench.dispatched(f"r{n}")[1:] for n in range(4)]
    assert pairs == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    "tokens, max_tokens, error",
    [(0, 5, "BadRequest"), (512, 1, "BadRequest"), (1, 512, "BadRequest"), (500, 12, None)],
)
def test_what_can_never_fit_is_rejected(tokens: int, max_tokens: int, error: str | None) -> None:
    bench = pair()
    bench.submit(request("a", tokens, max_tokens))
    (said,) = bench.fronts
    assert (said.error if isinstance(said, Rejected) else None) == error


def test_limit_is_the_smallest_pools() -> None:
    bench = pair()
    assert bench.cluster.registry.max_model_len() == 512
    bench.join("d1", blocks=10)
    assert bench.cluster.registry.max_model_len() == 160


def test_nobody_to_serve_it() -> None:
    for bench in (ClusterBench(), ClusterBench("p0")):
        bench.submit(request("a"))
        (said,) = bench.fronts
        assert isinstance(said, Rejected) and said.error == "NoWorker"
    bench = pair()
    bench.say("d0", heartbeat(draining=True))
    bench.submit(request("a"))
    assert isinstance(bench.fronts[-1], Rejected)
    bench.check_settled()


def test_queue_is_bounded_by_requests_and_by_tokens() -> None:
    """BR-119."""
    bench = ClusterBench("p0", "d0", max_requests=2, max_tokens=300)
    for name in ("run", "w1"):
        bench.submit(request(name, 200))
    bench.submit(request("w2", 200))
    (rejected,) = [m for m in bench.fronts if isinstance(m, Rejected)]
    assert (rejected.id, rejected.error) == ("w2", "NotAdmitted") and rejected.retry_after_s >= 1
    bench.submit(request("w3", 70))
    bench.submit(request("w4", 70))
    assert [m.id for m in bench.fronts if isinstance(m, Rejected)] == ["w2", "w4"]


def test_draining_coordinator_takes_nothing_new() -> None:
    bench = pair()
    bench.cluster.draining = True
    bench.submit(request("a"))
    (said,) = bench.fronts
    assert isinstance(said, Rejected) and said.error == "NoWorker"


# ---------------------------------------------------------------- order


def test_a_worker_gets_two_steps_of_work_and_the_next_at_the_first_token() -> None:
    bench = pair()
    keys = [bench.dispatched(f"r{n}", 60)[0] for n in range(2)]
    assert bench.submit(request("waits", 60)) == []
    told = bench.front(Progress(((keys[0][0], 0, (1,)),)))
    assert kinds(told) == [("p0", "Prefill")], "at once, not at the next look"


def test_a_long_prompt_lets_a_few_pass() -> None:
    """BR-068: what does not fit holds nobody back, and is not held back for ever."""
    bench = ClusterBench("p0", "d0")
    first, _, _ = bench.dispatched("first", 60)
    bench.dispatched("second", 60)
    assert bench.submit(request("large", 60)) == []
    passed = 0
    for number in range(MAX_PASSES + 5):
        told = bench.submit(request(f"s{number}", 8))
        if not told:
            break
        passed += 1
        bench.front(RequestFinished(RequestId(f"s{number}"), "stop"))
    assert passed == MAX_PASSES
    told = bench.front(RequestFinished(first[0], "stop"))
    assert next(m.id for _, m in told if isinstance(m, Prefill)) == "large"


def test_BR_067_a_long_prompt_that_waits_for_another_is_passed_by_short_ones_alone() -> None:
    """They take nothing of what it waits for, however many they are; and it is next when the other one is done."""
    bench = ClusterBench("p0", "d0")
    first, _, _ = bench.dispatched("first", 200)
    for number in range(MAX_BLOCKED + 5):
        assert bench.submit(request(f"long{number}", 100, first_id=1000 + 100 * number)) == []
    for number in range(MAX_PASSES + 5):
        assert kinds(bench.submit(request(f"s{number}", 10))) == [("p0", "Prefill")]
        bench.front(RequestFinished(RequestId(f"s{number}"), "stop"))
    told = bench.front(Progress(((first[0], 0, (1,)),)))
    assert [m.id for _, m in told if isinstance(m, Prefill)] == ["long0"]


def test_what_waits_is_in_order_of_tenants_by_what_they_were_served() -> None:
    """Prompt tokens when given out, answer tokens as they come."""
    bench = pair()
    keys = [bench.dispatched(name, 64)[0] for name in ("x", "y")]
    for name in ("a1", "a2", "b1", "a3", "b2", "b3"):
        assert bench.submit(replace(request(name, 64), tenant=name[0])) == []
    bench.told.clear()
    bench.front(RequestFinished(keys[0][0], "stop"))
    bench.front(Progress(((RequestId("a1"), 0, tuple(range(40))),)))
    for done in (keys[1][0], "b1", "b2", "b3"):
        bench.front(RequestFinished(RequestId(done), "stop"))
    order = [str(message.id) for _, message in bench.told if isinstance(message, Prefill)]
    assert order == ["a1", "b1", "b2", "b3", "a2", "a3"], "a1's answer is as dear as more than a prompt"


def test_a_request_is_sent_with_what_is_left_of_its_time() -> None:
    bench = pair()
    keys = [bench.dispatched(name, 64)[0] for name in ("x", "y")]
    bench.submit(replace(request("soft"), deadline_s=4.0))
    bench.submit(replace(request("hard"), deadline_s=4.0), deadline_s=3.0)
    bench.now = 1.0
    told = bench.front(RequestFinished(keys[0][0], "stop"))
    assert [(m.id, m.request.deadline_s) for _, m in told if isinstance(m, Prefill)] == [
        ("hard", 2.0),
        ("soft", 3.0),
    ]


def test_who_comes_in_behind_many_without_room_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be given out, so a full service does not pay for looking; who stands before them is looked for."""
    bench = ClusterBench("p0", "d0")
    first, _, _ = bench.dispatched("first", 64)
    bench.dispatched("second", 64)
    for number in range(MAX_BLOCKED + 2):
        assert bench.submit(request(f"r{number}")) == []
    looked_for: list[RequestId] = []
    pick = Placing.pick

    def noted(self: Placing, tracked: Tracked, now: float, waiting: int) -> Any:
        looked_for.append(tracked.id)
        return pick(self, tracked, now, waiting)

    monkeypatch.setattr(Placing, "pick", noted)
    bench.submit(request("behind"))
    assert looked_for == []
    bench.submit(replace(request("before"), deadline_s=9.0))
    assert looked_for[0] == "before"
    told = bench.front(RequestFinished(first[0], "stop"))
    assert told[0][1].id == "before"  # type: ignore[attr-defined]


@pytest.mark.parametrize("larges", [1, MAX_BLOCKED + 3])
def test_what_no_worker_that_is_left_could_hold_is_in_nobodys_way(larges: int) -> None:
    """They wait for another such worker; room made meanwhile is of no use to them, so nobody keeps it for them."""
    bench = ClusterBench("d0")
    for number in range(larges):
        bench.submit(request(f"large{number}", 20, 400))
    bench.join("d1", blocks=10)
    bench.note(bench.cluster.worker_died(WorkerId("d0"), Incarnation(1), bench.now))
    for number in range(MAX_PASSES + 5):
        assert kinds(bench.submit(request(f"s{number}", 10))) == [("d1", "Decode")], number
        bench.front(RequestFinished(RequestId(f"s{number}"), "stop"))
    told = bench.join("d2")
    assert {m.id for w, m in told if isinstance(m, Decode) and w == "d2"} == {
        f"large{number}" for number in range(min(larges, 6))
    }, "two steps of prompts"


def test_a_worker_that_orders_otherwise_is_named() -> None:
    bench = ClusterBench("p0", "d0")
    for policy, named in (("", False), ("fair", False), ("fcfs", True)):
        bench.cluster.notices.clear()
        bench.say("d1", replace(card("d1"), scheduling_policy=policy), incarnation=1)
        assert (
            any("d1 orders by fcfs, the queue here by fair" in one for one in bench.cluster.notices) == named
        )


def test_a_small_worker_that_takes_the_limit_down_is_told_of() -> None:
    bench = ClusterBench("p0", "d0")
    bench.cluster.notices.clear()
    bench.join("d1", blocks=10)
    (notice,) = bench.cluster.notices
    assert "512 to 160 tokens" in notice
    bench.cluster.notices.clear()
    bench.join("d2", blocks=10)
    (notice,) = bench.cluster.notices
    assert "tokens" not in notice, "it changes nothing"


def test_a_worker_that_comes_gets_all_it_has_room_for() -> None:
    bench = ClusterBench("p0", "d0")
    for number in range(8):
        bench.dispatched(f"first{number}", 1)
    for number in range(60):
        assert bench.submit(request(f"r{number}", 1)) == []
    bench.incarnations["d1"] = 1
    told = bench.say("d1", card("d1", max_num_seqs=64, blocks=1000))
    assert len([m for _, m in told if isinstance(m, Prefill)]) == 60, "not only as many as one look takes"


def test_classes_first() -> None:
    bench = pair()
    assert kinds(bench.submit(request("first", 128, priority=-2))) == [("p0", "Prefill")]
    for name, priority in (("low", 2), ("high", -1), ("mid", 0)):
        assert bench.submit(request(name, 128, priority=priority)) == []
    order = []
    done = RequestId("first")
    for _ in range(3):
        ((_, command),) = bench.front(RequestFinished(done, "stop"))
        assert isinstance(command, Prefill)
        done = command.id
        order.append(str(done))
    assert order == ["high", "mid", "low"]


# ---------------------------------------------------------------- answers


def test_BR_030_an_unanswered_dispatch_is_said_again_then_goes_elsewhere() -> None:
    bench = four()
    key, prefill, _ = bench.dispatched()
    commands = []
    for tenth in range(1, 60):
        bench.now = tenth / 10
        for name in bench.incarnations:
            bench.say(name, heartbeat())
        commands += bench.turn()
    says = [worker for worker, message in bench.told if isinstance(message, Prefill)]
    assert says[: MAX_ASKS + 1] == [prefill] * MAX_ASKS + ["p1"], "and not the same silent one again"
    assert (prefill, Abort(*key, "the worker did not answer the dispatch")) in commands


def test_later_keeps_asking_and_has_a_limit() -> None:
    bench = four()
    key, prefill, _ = bench.dispatched()
    for second in range(1, 118):
        bench.beat_all(at=float(second))
        bench.say(prefill, Later(*key, 1e9))
    assert bench.cluster.num_running() == 1 and len({w for w, m in bench.told if isinstance(m, Prefill)}) == 1
    bench.beat_all(at=121.0)
    told = bench.say(prefill, Later(*key, 0.1))
    assert ("p1", "Prefill") in kinds(told)


def test_refused_goes_elsewhere_at_once() -> None:
    bench = four()
    key, prefill, _ = bench.dispatched()
    told = bench.say(prefill, Refused(*key, "draining"))
    assert [w for w, m in told if isinstance(m, Prefill)] == ["p1"]
    assert bench.say(prefill, Refused(*key, "draining")) == [], "an old attempt's"


def test_BR_029_where_the_only_way_between_two_pools_is_cut_the_decode_worker_does_both() -> None:
    """The prefill worker says that it cannot reach its target: the next attempt needs no way between them."""
    bench = pair()
    key, prefill, decode = bench.accepted()
    told = bench.say(prefill, Ended(*key, outcome="failed", reason="transfer: decode-0 cannot be reached"))
    ((worker, command),) = [(w, m) for w, m in told if isinstance(m, Prefill | Decode)]
    assert worker == decode and isinstance(command, Decode)
    assert isinstance(bench.submit(request("b"))[0][1], Prefill), "others are not kept from trying"


def test_refused_by_everybody_is_an_end() -> None:
    bench = pair()
    key, worker, _ = bench.dispatched()
    asked = [worker]
    for _ in range(MAX_FRUITLESS):
        for told, message in bench.say(worker, Refused(*key, "no")):
            if isinstance(message, Prefill | Decode):
                key, worker = message.key, told
                asked.append(told)
    assert asked == ["p0", "d0", "d0", "d0", "d0"]
    assert failure(bench).error == "RequestFailed" and "5 attempts" in failure(bench).reason
    bench.check_settled()


def test_BR_051_a_failed_attempt_is_repeated_and_a_hopeless_one_is_not() -> None:
    bench = four()
    key, prefill, decode = bench.accepted()
    told = bench.say(prefill, Ended(*key, outcome="failed", reason="transfer: no progress"))
    assert {(prefill, "Abort"), (decode, "Abort")} <= set(kinds(told))
    (again,) = [m for _, m in told if isinstance(m, Prefill)]
    bench.say(prefill, Ended(*again.key, outcome="failed", reason="ValueError in its step", retryable=False))
    bench.say("p1", Ended(*again.key, outcome="failed", reason="ValueError in its step", retryable=False))
    assert "ValueError" in failure(bench).reason
    bench.check_settled()


def test_started_there_beats_failed_here() -> None:
    """When views disagree, the side that did the work wins; its heartbeat says so too when Started was lost."""
    for by_heartbeat in (False, True):
        bench = four()
        key, prefill, decode = bench.accepted()
        if by_heartbeat:
            bench.say(decode, heartbeat((key, "decoding")))
        else:
            bench.say(decode, Started(*key, "decode_ready"))
        assert bench.say(prefill, Ended(*key, outcome="failed", reason="transfer: no progress")) == []
        assert (
            bench.phase() == ("decoding" if by_heartbeat else "decode_ready")
            and bench.cluster.num_running() == 1
        )


def test_a_reservation_is_not_a_start() -> None:
    bench = four()
    key, prefill, decode = bench.accepted()
    bench.say(decode, heartbeat((key, "kv_ready")))
    assert bench.phase() == "prefilling"
    assert ("p1", "Prefill") in kinds(bench.say(prefill, Ended(*key, outcome="failed")))


# ---------------------------------------------------------------- phases


def test_every_phase_at_a_worker_is_seen() -> None:
    """1 put out of the batch  2 computed anew  3 in it again, by a token  4 put out, and 5 in it, by heartbeats. A word
    from before changes nothing."""
    bench = pair()
    key, prefill, decode = bench.decoding()
    assert bench.phase() == "decode_ready"
    bench.say(decode, Started(*key, "preempted"))
    assert bench.phase() == "preempted"
    bench.say(decode, Started(*key, "prefilling"))
    assert bench.phase() == "prefilling"
    bench.front(Progress(((A, 1, (2,)),)))
    assert bench.phase() == "decoding"
    for late in ("decode_ready", "prefilling", "kv_ready", "queued", "waiting", "finished", "nonsense"):
        bench.say(decode, heartbeat((key, late)))
    for word in ("prefilling", "kv_ready", "preempted"):
        bench.say(prefill, heartbeat((key, word)))
    assert bench.phase() == "decoding"
    bench.say(decode, heartbeat((key, "preempted")))
    assert bench.phase() == "preempted"
    bench.say(decode, heartbeat((key, "decoding")))
    assert bench.phase() == "decoding"


def test_tokens_of_before_do_not_take_a_request_out_of_the_queue() -> None:
    """Its worker is lost, and what that one had said comes while nobody else is there."""
    bench = pair()
    _, _, decode = bench.decoding(tokens_out=2)
    bench.cluster.worker_died(WorkerId(decode), Incarnation(1), bench.now)
    assert bench.phase() == "waiting"
    bench.front(Progress(((A, 2, (7,)),)))
    assert bench.phase() == "waiting"
    ((_, command),) = [(w, m) for w, m in bench.join("d1") if isinstance(m, Prefill)]
    assert command.output_ids == pack_ids([0, 1, 7]) and bench.phase() == "queued"


# ---------------------------------------------------------------- losses


def lose(bench: ClusterBench, *gone: str, **held: tuple[Key, str]) -> list[tuple[str, Message]]:
    """`gone` fall silent, the others go on and say what they hold; what is told when it is noticed."""
    told: list[tuple[str, Message]] = []
    start = bench.now
    for half in range(1, 9):
        bench.now = start + half / 2
        for name in bench.incarnations:
            if name not in gone:
                told += bench.say(name, heartbeat(*([held[name]] if name in held else [])))
        told += bench.turn()
    return [(w, m) for w, m in told if not isinstance(m, HeartbeatAck)]


def test_decode_worker_lost_before_the_handover_costs_a_rebind() -> None:
    bench = four()
    key, prefill, decode = bench.accepted()
    told = lose(bench, decode, p0=(key, "prefilling"))
    rebinds = [m for w, m in told if isinstance(m, Rebind) and w == prefill]
    assert rebinds and rebinds[0] == Rebind(*key, address("d1"))
    assert not [m for _, m in told if isinstance(m, Prefill)], "nothing is prefilled again"
    bench.say(prefill, Accepted(*key, address("d1")))
    bench.say("d1", Started(*key, "decode_ready"))
    bench.front(RequestFinished(A, "stop"))
    bench.check_settled()


def test_an_older_answer_does_not_pass_for_the_rebinds() -> None:
    """By level: only an answer that names the present target ends the asking."""
    bench = four()
    key, prefill, decode = bench.accepted()
    bench.told.clear()
    told = bench.join(decode, incarnation=2)
    (rebind,) = [m for _, m in told if isinstance(m, Rebind)]
    assert rebind.target == address("d1")
    bench.say(prefill, Accepted(*key, address(decode)))  # doubled, from before
    bench.now = 1.5
    for name in bench.incarnations:
        bench.say(name, heartbeat(*([(key, "prefilling")] if name == prefill else [])))
    assert (prefill, rebind) in bench.turn(), "said again"
    bench.say(prefill, Accepted(*key, address("d1")))
    bench.now = 3.0
    for name in bench.incarnations:
        bench.say(name, heartbeat(*([(key, "prefilling")] if name == prefill else [])))
    assert (prefill, rebind) not in bench.turn()


def test_target_lost_before_the_dispatch_was_answered() -> None:
    """The first dispatch came through with the old target: its answer shows it, and a Rebind follows."""
    bench = four()
    key, prefill, decode = bench.dispatched()
    told = bench.join(decode, incarnation=2)
    (again,) = [m for _, m in told if isinstance(m, Prefill)]
    assert (again.key, again.target) == (key, address("d1"))
    told = bench.say(prefill, Accepted(*key, address(decode)))
    assert told == [(prefill, Rebind(*key, address("d1")))]
    bench.say(prefill, Accepted(*key, address("d1")))


def test_BR_077_decode_worker_lost_while_decoding_goes_on_from_the_fronts_tokens() -> None:
    """3 of 5 are out."""
    bench = four()
    key, _, decode = bench.decoding(tokens_out=3)
    told = lose(bench, decode)
    (command,) = [m for _, m in told if isinstance(m, Prefill)][:1]
    assert command.output_ids == pack_ids([0, 1, 2]) and command.attempt > key[1]
    assert command.target == address("d1")
    bench.front(Progress(((A, 3, (3, 4)),)))
    bench.front(RequestFinished(A, "length"))
    bench.check_settled()


def test_prefill_worker_lost_after_the_handover_is_nobodys_loss() -> None:
    bench = four()
    key, prefill, _ = bench.decoding()
    assert lose(bench, prefill, d0=(key, "decoding")) == []
    assert bench.phase() == "decoding"


def test_a_request_that_ran_on_two_dead_workers_is_failed() -> None:
    """Poison does not walk through the cluster."""
    bench = ClusterBench("p0", "p1", "p2", "d0")
    _, prefill, _ = bench.accepted()
    told = bench.join(prefill, incarnation=2)
    ((second, command),) = [(w, m) for w, m in told if isinstance(m, Prefill)]
    bench.say(second, Accepted(*command.key, address("d0")))
    bench.say(second, Started(*command.key, "prefilling"))
    bench.join(second, incarnation=2)
    assert (
        failure(bench).reason == f"2 workers were lost while running it, the last one {second}, in prefilling"
    )
    bench.check_settled()


def test_a_request_that_only_stood_in_line_is_not_blamed() -> None:
    bench = ClusterBench("p0", "p1", "p2", "d0")
    _, prefill, _ = bench.dispatched()
    for _ in range(3):
        told = bench.join(prefill, incarnation=bench.incarnations[prefill] + 1)
        ((prefill, _),) = [(w, m) for w, m in told if isinstance(m, Prefill | Decode)]
    assert prefill == "d0", "no prefill worker is left that has not been lost under it"
    assert not [m for m in bench.fronts if isinstance(m, RequestEnded)]


def test_a_hung_model_thread_is_a_loss() -> None:
    """Its I/O thread still sends heartbeats."""
    bench = four()
    bench.accepted()
    told = bench.say("p0", heartbeat(progress_age_s=61.0)) + bench.turn()
    assert ("p1", "Prefill") in kinds(told)


def test_no_worker_left_waits_and_then_fails() -> None:
    bench = pair()
    bench.accepted()
    bench.turn(at=4.0)
    assert bench.phase() == "waiting"
    bench.turn(at=125.0)
    assert failure(bench).error == "DeadlinePassed"
    bench.check_settled()


# ---------------------------------------------------------------- reconciliation


def test_what_a_worker_holds_and_should_not_is_aborted_by_the_answer() -> None:
    bench = pair()
    key, prefill, _ = bench.accepted()
    other = (RequestId("ghost"), Attempt(5))
    old = (A, Attempt(key[1] - 1))
    ((_, answer),) = bench.say(prefill, heartbeat((key, "prefilling"), (other, "queued"), (old, "kv_ready")))
    assert answer == HeartbeatAck(True, (other, old))


def test_what_nobody_holds_is_dispatched_again() -> None:
    bench = four()
    key, _, decode = bench.decoding()
    for half in range(1, 8):
        bench.now = half / 2
        for name in bench.incarnations:
            bench.say(name, heartbeat())
        told = bench.turn()
        if told:
            break
    assert (bench.now == 2.5 and ("p0", "Prefill") in kinds(told)) or ("p1", "Prefill") in kinds(told)
    assert (decode, Abort(*key, "no worker holds it any more")) in told


def test_a_worker_that_falls_silent_is_a_death_of_what_it_runs() -> None:
    """Its requests are not taken for forgotten before it is taken for lost: poison on hosts whose processes nobody can
    watch would walk on from worker to worker, uncounted."""
    bench = four()
    _, _, decode = bench.decoding()
    while not bench.turn():
        bench.now += 0.5
        for name in bench.incarnations:
            if name != decode:
                bench.say(name, heartbeat())
    tracked = bench.cluster.tracker.get(A)
    assert tracked is not None and tracked.deaths == 1 and bench.now == 3.5


def test_a_lost_last_token_is_made_again() -> None:
    """The decode worker has ended, the front has not: nothing else would ever come."""
    bench = four()
    key, _, decode = bench.decoding(tokens_out=4)
    bench.say(decode, Ended(*key, outcome="finished"))
    told = lose(bench)
    (command,) = [m for _, m in told if isinstance(m, Prefill)][:1]
    assert command.output_ids == pack_ids([0, 1, 2, 3])


def test_a_gap_starts_a_next_attempt() -> None:
    bench = four()
    key, _, _ = bench.decoding()
    told = bench.front(Progress((), ((A, key[1]),)))
    assert "Prefill" in {kind for _, kind in kinds(told)}
    assert bench.front(Progress((), ((A, key[1]),))) == [], "of an older attempt"


def test_restarted_coordinator_learns_its_workers_and_ends_orphans() -> None:
    before = pair()
    key, _, _ = before.decoding()
    bench = ClusterBench(epoch=2)
    bench.incarnations = {"p0": 1, "d0": 1}
    ((_, answer),) = bench.say("d0", heartbeat((key, "decoding")))
    assert answer == HeartbeatAck(known=False)
    for name in ("d0", "p0"):
        ((_, registered),) = bench.say(name, card(name))
        assert isinstance(registered, Registered)
    ((_, answer),) = bench.say("d0", heartbeat((key, "decoding")))
    assert answer == HeartbeatAck(True, (key,))
    assert bench.dispatched("b")[0][1] > key[1]


def test_an_old_incarnation_is_fenced() -> None:
    bench = four()
    key, prefill, _ = bench.accepted()
    bench.join(prefill, incarnation=2)
    phase = bench.phase()
    for late in (
        Accepted(*key),
        Started(*key, "prefilling"),
        Ended(*key, outcome="failed"),
        Refused(*key, "x"),
    ):
        assert bench.say(prefill, late, incarnation=1) == []
    assert bench.phase() == phase
    assert bench.say(prefill, heartbeat(), incarnation=1) == [(prefill, HeartbeatAck(known=False))]


def test_a_late_registration_of_an_old_incarnation_puts_nobody_out() -> None:
    bench = four()
    bench.join("p0", incarnation=2)
    key, prefill, _ = bench.accepted()
    assert prefill == "p0"
    ((_, answer),) = bench.say("p0", card("p0", 1), incarnation=1)
    assert isinstance(answer, RegistrationRefused) and answer.field == "worker_id"
    assert bench.say("p0", heartbeat((key, "prefilling"))) == [("p0", HeartbeatAck(True))]


def test_a_worker_known_to_be_dead_is_lost_without_waiting_for_heartbeats() -> None:
    bench = four()
    key, prefill, _ = bench.accepted()
    stale = bench.cluster.worker_died(WorkerId(prefill), Incarnation(99), bench.now)
    assert stale == [], "another life of it"
    effects = bench.cluster.worker_died(
        WorkerId(prefill), Incarnation(bench.incarnations[prefill]), bench.now
    )
    dispatched = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Prefill)]
    assert len(dispatched) == 1 and dispatched[0].attempt > key[1], "goes on at the other one, at once"
    worker = bench.cluster.registry.get(WorkerId(prefill))
    assert worker is not None and worker.state == "lost"
    assert any(f"{prefill} died" in notice for notice in bench.cluster.notices)
    again = bench.cluster.worker_died(WorkerId(prefill), Incarnation(bench.incarnations[prefill]), bench.now)
    assert again == []


def test_BR_144_another_fingerprint_is_refused_with_both_values() -> None:
    bench = pair()
    bench.incarnations["d1"] = 1
    ((_, answer),) = bench.say("d1", card("d1", dtype="float16"))
    assert answer == RegistrationRefused("dtype", "bfloat16", "float16")
    ((_, answer),) = bench.say("d1", card("d1", tokenizer="other"))
    assert answer == RegistrationRefused("tokenizer", "t", "other")


# ---------------------------------------------------------------- ends from the front


@pytest.mark.parametrize("how", ["leaves", "stops"])
@pytest.mark.parametrize("station", ["waiting", "queued", "prefilling", "decoding"])
def test_BR_003_ended_by_the_client_at_every_station(station: str, how: str) -> None:
    """The coordinator owns the request in every phase and tells everybody who may hold it."""
    bench = pair()
    if station == "waiting":
        bench.dispatched("first", 128)
        assert bench.submit(request("a", 100)) == []
    else:
        {"queued": bench.dispatched, "prefilling": bench.accepted, "decoding": bench.decoding}[station]()
    told = bench.front(CancelRequest(A, "client left") if how == "leaves" else StopRequest(A))
    kind = Abort if how == "leaves" else Stop
    holders = [] if station == "waiting" else ["p0", "d0"]
    assert [w for w, m in told if isinstance(m, kind)] == holders
    assert bench.front(CancelRequest(A, "again")) == bench.front(StopRequest(A)) == []
    if station == "waiting":
        bench.front(CancelRequest(RequestId("first"), "client left"))
    bench.check_settled()


def test_deadline_is_for_the_first_token() -> None:
    bench = pair()
    key, prefill, _ = bench.dispatched("b")
    bench.submit(request("a"), deadline_s=1.0)
    bench.say(prefill, Accepted(*key, address("d0")))
    bench.front(Progress(((RequestId("b"), 0, (1,)),)))
    bench.turn(at=1.1)
    assert (failure(bench).id, failure(bench).error) == ("a", "DeadlinePassed")


@pytest.mark.parametrize("word", ["its first token", "one beyond that", "a score of its prompt"])
def test_whose_first_word_comes_after_its_deadline_ends_there(word: str) -> None:
    """No look at the clock lies between. Who has its first token, or time, is none of them."""
    bench = ClusterBench("d0")
    keys = []
    for name, deadline_s in (("begun", 1.0), ("late", 1.0), ("early", 9.0)):
        ((_, command),) = bench.submit(request(name), deadline_s=deadline_s)
        assert isinstance(command, Decode)
        keys.append(command.key)
    bench.front(Progress(((RequestId("begun"), 0, (1,)),)))
    bench.now = 1.05
    begun, late, early = keys
    rows = [TokenRow(*begun, 1, (2,)), TokenRow(*early, 0, (1,))]
    prompts = [PromptRow(*late, 1, (TokenLogprobs(-1.0, ()),))] if "score" in word else []
    if not prompts:
        rows.insert(1, TokenRow(*late, 0 if "first" in word else 3, (1,)))
    said = Tokens(1, tuple(rows), tuple(prompts))
    tokens, dropped, ends = bench.cluster.hear_tokens(said, WorkerId("d0"), bench.now)
    assert (tokens, dropped) == (said, 0), "the front closes its stream first"
    assert [(w, m.id) for w, m in bench.note(ends) if isinstance(m, Abort)] == [("d0", "late")]
    assert (failure(bench).id, failure(bench).error) == ("late", "DeadlinePassed")
    assert bench.phase("late") == "failed" and bench.cluster.num_running() == 2
    assert bench.cluster.hear_tokens(said, WorkerId("d0"), bench.now)[2] == []


def test_deadline_does_not_end_an_answer_that_waits_for_its_next_attempt() -> None:
    bench = pair()
    bench.submit(request("a"), deadline_s=2.0)
    bench.front(Progress(((A, 0, (1,)),)))
    bench.turn(at=4.0)  # both workers are lost, the first token is out
    bench.turn(at=10.0)
    assert bench.phase() == "waiting" and not [m for m in bench.fronts if isinstance(m, RequestEnded)]
    bench.turn(at=125.0)
    assert failure(bench).error == "RequestFailed"


def test_a_waiting_requests_deadline() -> None:
    bench = pair()
    bench.dispatched("first", 128)
    bench.submit(request("a", 100), deadline_s=1.0)
    bench.turn(at=0.9)
    assert bench.phase() == "waiting"
    bench.beat_all(at=1.3)
    assert failure(bench).error == "DeadlinePassed"
    assert bench.cluster.num_waiting() == 0


def test_ended_requests_keep_numbers_not_prompts() -> None:
    """BR-128: a thousand prompts remembered are hundreds of megabytes."""
    bench = pair()
    bench.decoding()
    bench.front(RequestFinished(A, "length"))
    kept = bench.cluster.tracker._recent[A]
    assert kept.request.prompt_ids == b"" and kept.outputs == []
    timeline = bench.cluster.timeline(A, bench.now)
    assert timeline is not None and (timeline["prompt_tokens"], timeline["output_tokens"]) == (20, 1)


def test_who_is_refused_puts_nobody_out() -> None:
    """Somebody under a worker's name, as its next life, whose registration is not taken."""
    bench = ClusterBench("d0")
    bench.submit(request("a"))
    ((_, answer),) = [
        told for told in bench.say("d0", card("d0", 2, tokenizer="another"), 2) if told[0] == "d0"
    ]
    assert isinstance(answer, RegistrationRefused)
    worker = bench.cluster.registry.get(WorkerId("d0"))
    assert worker is not None and worker.incarnation == 1 and not worker.lost
    assert bench.cluster.counters.total("workers_lost_total") == 0


def test_tokens_are_their_holders_to_say() -> None:
    bench = ClusterBench("d0", "d1")
    ((holder, command),) = bench.submit(request("a"))
    assert isinstance(command, Decode)
    other = WorkerId("d1" if holder == "d0" else "d0")
    may_come_from = bench.cluster.tracker.may_come_from
    assert may_come_from(WorkerId(holder), command.key)
    assert not may_come_from(other, command.key)
    assert not may_come_from(WorkerId(holder), (command.id, Attempt(command.attempt + 1)))
    assert may_come_from(other, (RequestId("ended"), Attempt(1))), "the front drops those itself"
