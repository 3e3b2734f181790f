"""Who gets a request: by first token, cached beginnings and ITL targets; when a decode worker computes it itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.front_messages import Progress, RequestFinished
from common.messages import Accepted, Decode, Message, Prefill, Started
from common.promised import GUESTS_FOR_S
from common.request import Incarnation, Key, RequestId, WorkerId
from common.step_times import Coefficients
from coordinator.prefixes import PIECE_TOKENS
from coordinator.targets import Targets
from tests.coordinator.cluster_bench import ClusterBench, address, heartbeat, request

FAST: Coefficients = (0.01, 0.001, 0.0, 0.0005)
"""A step of a row takes 11 ms, each more 1 ms, 64 tokens of a prompt 43 ms."""
SLOW: Coefficients = (0.04, 0.004, 0.0, 0.002)
CHAT = {"chat": Targets(ttft_s=1.0, itl_s=0.02)}


def known(*names: str, model: Coefficients = FAST, **settings: object) -> ClusterBench:
    bench = ClusterBench(*names, **settings)  # type: ignore[arg-type]
    for name in names:
        bench.say(name, heartbeat(step_model=model))
    return bench


def sent(told: list[tuple[str, Message]]) -> tuple[str, str]:
    """Who computes the prompt, and who decodes."""
    ((worker, command),) = [(w, m) for w, m in told if isinstance(m, (Prefill, Decode))]
    if isinstance(command, Decode):
        return worker, worker
    assert command.target is not None
    return worker, str(command.target.worker)


def through(bench: ClusterBench, name: str, told: list[tuple[str, Message]]) -> None:
    """From dispatch to the end of a short answer."""
    prefill, decode = sent(told)
    key: Key = told[-1][1].key  # type: ignore[attr-defined]
    bench.say(prefill, Accepted(*key, None if prefill == decode else address(decode)))
    bench.front(Progress(((RequestId(name), 0, (1,)),)))
    if prefill != decode:
        bench.say(decode, Started(*key, "decode_ready"))
    bench.front(Progress(((RequestId(name), 1, (2,)),)))
    bench.front(RequestFinished(RequestId(name), "stop"))


# ---------------------------------------------------------------- prefill by first token


def test_the_worker_that_has_it_first_computes_it() -> None:
    """A slow worker gets a prompt only when the fast one has more ahead than that costs."""
    bench = known("p0", "p1", "d0")
    bench.say("p0", heartbeat(step_model=SLOW))
    assert [sent(bench.submit(request(f"r{n}", 32)))[0] for n in range(5)] == ["p1", "p1", "p1", "p1", "p0"]


def test_where_step_times_are_not_known_of_all_tokens_decide() -> None:
    bench = known("p0", "d0")
    bench.join("p1")
    assert [sent(bench.submit(request(f"r{n}", 20)))[0] for n in range(4)] == ["p0", "p1", "p0", "p1"]


# ---------------------------------------------------------------- prefix hits


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    bench = known("p0", "p1", "d0", "d1")
    filler = bench.submit(request("filler", 40, first_id=1000))
    assert sent(filler) == ("p0", "d0")
    first = bench.submit(request("first", 3 * PIECE_TOKENS))
    assert sent(first) == ("p1", "d1")
    through(bench, "filler", filler)
    through(bench, "first", first)
    assert sent(bench.submit(request("again", 3 * PIECE_TOKENS))) == ("p1", "d1")
    assert sent(bench.submit(request("other", 3 * PIECE_TOKENS, first_id=500))) == ("p0", "d0")


def test_affinity_outranks_neither_load_nor_room_nor_liveness() -> None:
    def cached_at_d0() -> ClusterBench:
        bench = known("p0", "d0", "d1")
        first = bench.submit(request("first", 2 * PIECE_TOKENS))
        assert sent(first)[1] == "d0"
        through(bench, "first", first)
        return bench

    def decider(bench: ClusterBench) -> str:
        bench.front(Progress(tuple((RequestId(f"n{n}"), 0, (1,)) for n in range(9))))  # nobody is ahead of it
        return sent(bench.submit(request("again", 2 * PIECE_TOKENS)))[1]

    assert decider(cached_at_d0()) == "d0"
    loaded = cached_at_d0()
    for number in range(7):  # 4 and 3 of 8 rows
        loaded.submit(request(f"n{number}", 16, first_id=1000))
        loaded.front(Progress(((RequestId(f"n{number}"), 0, (1,)),)))
    assert decider(loaded) == "d0", "an eighth of its batch is less than what it has"
    lost = cached_at_d0()
    lost.note(lost.cluster.worker_died(WorkerId("d0"), Incarnation(1), lost.now))
    assert decider(lost) == "d1"
    draining = cached_at_d0()
    draining.say("d0", heartbeat(draining=True))
    assert decider(draining) == "d1"


# ---------------------------------------------------------------- rows and ITL targets


def test_who_came_while_every_batch_was_full_gets_the_next_rows_in_order() -> None:
    bench = known("p0", "d0")
    for number in range(20):
        bench.submit(request(f"r{number}", 4))
    assert dispatched(bench.told) == [f"r{number}" for number in range(8)]
    for ended, next_one in (("r3", "r8"), ("r8", "r9")):
        assert dispatched(bench.front(RequestFinished(RequestId(ended), "stop"))) == [next_one]
    bench.told.clear()
    bench.join("d1")
    assert dispatched(bench.told) == [f"r{number}" for number in range(10, 18)]
    bench.submit(request("better", 4, priority=-1))
    assert dispatched(bench.front(RequestFinished(RequestId("r9"), "stop"))) == ["better"]


def dispatched(told: list[tuple[str, Message]]) -> list[str]:
    return [command.id for _, command in told if isinstance(command, Prefill)]


def rows_given(bench: ClusterBench, tier: str, count: int, priority: int = 0) -> int:
    """How many of so many that are asked for find a row."""
    given = 0
    for number in range(count):
        name = f"{tier}{number}"
        told = bench.submit(request(name, 16, 40, tier=tier, priority=priority, first_id=100 * number))
        given += bool(told)
        bench.front(Progress(((RequestId(name), 0, (1,)),)) if told else Progress(()))
    return given


def test_rows_keep_the_tightest_itl_target_of_the_batch() -> None:
    """10 ms and 1 for each row: eight keep nine tenths of 20 ms, and whoever comes then waits, promised or not."""
    assert rows_given(known("p0", "d0"), "chat", 20) == 8, "as many as the batch holds"
    bench = known("p0", "d0", targets={"chat": Targets(itl_s=0.016)})
    assert rows_given(bench, "chat", 3) == 3
    assert rows_given(bench, "default", 9) == 1
    assert bench.front(RequestFinished(RequestId("chat0"), "stop")) != []


def test_a_target_that_a_row_alone_would_miss_binds_nobody() -> None:
    assert rows_given(known("p0", "d0", targets={"chat": Targets(itl_s=0.005)}), "chat", 20) == 8


def test_who_is_promised_nothing_leaves_headroom_for_a_better_class_that_is_about() -> None:
    bench = known("p0", "d0", targets=CHAT)
    assert rows_given(bench, "chat", 1, priority=-1) == 1
    bench.front(RequestFinished(RequestId("chat0"), "stop"))
    assert rows_given(bench, "default", 20) == 7, "one row of eight stays free"
    assert bench.submit(request("chat-now", 16, tier="chat", priority=-1)) != []
    bench.front(RequestFinished(RequestId("chat-now"), "stop"))
    bench.beat_all(at=bench.now + GUESTS_FOR_S + 1)
    assert rows_given(bench, "default", 0) == 0
    assert bench.cluster.num_running() == 8, "nobody asked for the better class for long"


# ---------------------------------------------------------------- conditional disaggregation


@pytest.mark.parametrize("tokens, local", [(5, True), (64, False), (300, False)])
def test_a_short_prompt_is_computed_where_it_is_decoded(tokens: int, local: bool) -> None:
    """The way through both costs a hand-over, which is much for a short one."""
    bench = known("p0", "d0", local_prefill=True)
    prefill, decode = sent(bench.submit(request("a", tokens)))
    assert decode == "d0" and (prefill == "d0") == local
    never = known("p0", "d0")
    assert sent(never.submit(request("a", tokens))) == ("p0", "d0")


def test_decode_workers_take_prompts_while_prefill_is_behind_and_no_longer() -> None:
    bench = known("p0", "d0", local_prefill=True)
    assert sent(bench.submit(request("first", 300, first_id=1000))) == ("p0", "d0")
    behind = bench.submit(request("behind", 100, first_id=2000))
    assert sent(behind) == ("d0", "d0")
    bench.front(Progress(((RequestId("first"), 0, (1,)),)))
    bench.front(Progress(((RequestId("behind"), 0, (1,)),)))
    assert sent(bench.submit(request("later", 100, first_id=3000)))[0] == "p0"


def test_no_prompt_is_computed_beside_a_batch_whose_targets_leave_no_time() -> None:
    bench = known("p0", "d0", local_prefill=True, targets=CHAT)
    assert rows_given(bench, "chat", 1) == 1
    bench.submit(request("first", 300, first_id=1000))
    assert bench.submit(request("behind", 100, first_id=2000)) == []


def test_no_prompt_of_a_lower_class_is_computed_where_a_higher_one_that_is_about_would_miss_its_target() -> (
    None
):
    bench = known("p0", "d0", local_prefill=True, targets=CHAT)
    assert rows_given(bench, "chat", 1, priority=-1) == 1
    bench.front(RequestFinished(RequestId("chat0"), "stop"))
    bench.submit(request("first", 300, first_id=1000))
    assert bench.submit(request("behind", 100, first_id=2000)) == [], (
        "the batch is empty, but may not be for long"
    )


@pytest.mark.parametrize("rows, ttft_s, local", [(1, 1.0, True), (5, 1.0, False), (5, 0.3, True)])
def test_a_batch_waits_for_a_prompt_that_would_miss_its_target_else(
    rows: int, ttft_s: float, local: bool
) -> None:
    """By way of the prefill worker 0.28 s, beside the batch 0.2 less; each row loses 0.05 by it."""
    targets = {"chat": Targets(ttft_s=9.0), "now": Targets(ttft_s=ttft_s)}
    bench = known("p0", "d0", local_prefill=True, targets=targets)
    assert rows_given(bench, "chat", rows) == rows
    bench.submit(request("first", 300, first_id=1000))
    told = bench.submit(request("behind", 100, first_id=2000, tier="now"))
    assert ([sent([one]) for one in told] == [("d0", "d0")]) == local


def test_a_prompt_that_is_to_be_scored_goes_to_the_prefill_pool() -> None:
    bench = known("p0", "d0", local_prefill=True)
    asked = request("a", 5)
    asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0))
    assert sent(bench.submit(asked))[0] == "p0"
