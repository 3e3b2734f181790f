"""When a first token would come, and who is refused for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.front_messages import Admitted, Progress, Rejected, RequestFinished
from common.request import RequestId
from common.step_times import Coefficients
from coordinator.forecast import (
    FIRST_CORRECTION,
    LATELY_S,
    LONG,
    MOST_CORRECTION,
    Correction,
    _level,
    _steps_s,
    limit_s,
)
from coordinator.lookahead import Computer
from coordinator.step_costs import Beside, prompt_seconds, rows_within, share_seconds
from coordinator.targets import Targets
from coordinator.tracker import Forecast
from tests.coordinator.cluster_bench import ClusterBench, heartbeat, request

MODEL: Coefficients = (0.01, 0.001, 0.0, 0.001)
"""A chunk of 64 tokens takes 75 ms."""
CHAT = {"chat": Targets(ttft_s=0.5)}


def known(*names: str, **settings: object) -> ClusterBench:
    bench = ClusterBench(*names, **settings)  # type: ignore[arg-type]
    for name in names:
        bench.say(name, heartbeat(step_model=MODEL))
    return bench


def ask(
    bench: ClusterBench, name: str, tokens: int = 64, tier: str = "chat", priority: int = 0
) -> Rejected | None:
    bench.fronts.clear()
    place = sum(name.encode()) * 100  # no two share a beginning
    bench.submit(request(name, tokens, tier=tier, priority=priority, first_id=place))
    said = bench.fronts[0]
    assert isinstance(said, (Admitted, Rejected))
    return said if isinstance(said, Rejected) else None


# ---------------------------------------------------------------- costs


def test_a_prompt_takes_its_steps() -> None:
    assert prompt_seconds(MODEL, 64, 64) == pytest.approx(0.075)
    assert prompt_seconds(MODEL, 65, 64) == pytest.approx(0.087)
    assert prompt_seconds((0.0, 0.0, 1e-6, 0.0), 192, 64) == pytest.approx((64 + 128) * 1e-6)
    assert share_seconds(MODEL, 4, 64, 64) == pytest.approx(0.01 + 5 * 0.001 + 0.064)
    assert share_seconds(MODEL, 0, 0, 64) == 0.0


def test_rows_within_a_target() -> None:
    assert rows_within(MODEL, 0.02, 100) == 8
    assert rows_within(MODEL, 0.011, 100) > 1000, "what a row alone would miss binds nobody"
    assert rows_within((0.01, 0.0, 1e-5, 0.0), 0.02, 100) == 8


@pytest.mark.parametrize(
    "ahead_s, token_s, tokens, level_s",
    [
        ([1.0], [0.001], 0, 0.0),
        ([1.0], [0.001], 500, 1.5),
        ([1.0, 0.0], [0.001, 0.001], 500, 0.5),
        ([1.0, 0.0], [0.001, 0.001], 1500, 1.25),
        ([0.0, 0.0], [0.001, 0.003], 1000, 0.75),
    ],
)
def test_a_queue_fills_whoever_is_free_first(
    ahead_s: list[float], token_s: list[float], tokens: int, level_s: float
) -> None:
    assert _level(list(zip(ahead_s, token_s, strict=True)), tokens) == pytest.approx(level_s)


def test_an_answer_goes_on_in_longer_steps_while_prompts_stand_in_them() -> None:
    """Steps of 20 ms, or of a little over 100 in the half second that what was given takes, and from 1 s on for a
    quarter."""
    one = Computer(Beside(step_tokens=100, row_step_s=0.02, token_s=0.001, rows=3), [(0.5, 200)])
    assert _steps_s(3, 0.02, None) == pytest.approx(0.05)
    longer_s = one.pace.taken_s(200) / 2.5
    assert 0.1 < longer_s < 0.105
    before = 7.5 - 0.5 / longer_s
    assert _steps_s(3, 0.02, one) == pytest.approx(2.5 * longer_s)
    assert _steps_s(8, 0.02, one) == pytest.approx(0.5 + 0.02 * before)
    one.take(200, 1.0)
    assert _steps_s(8, 0.02, one) == pytest.approx(0.5 + 0.02 * before)
    during = before - 1.0
    assert _steps_s(32, 0.02, one) == pytest.approx(1.0 + longer_s * during)
    assert _steps_s(38, 0.02, one) == pytest.approx(1.0 + 2.5 * longer_s + 0.02 * (during + 6 - 2.5))


# ---------------------------------------------------------------- what is promised


def test_limits() -> None:
    idle = Forecast(0.1, 0.1, 0.03, 0.1)
    assert limit_s(idle, Targets()) is None
    assert limit_s(idle, Targets(ttft_s=0.5)) == 0.5
    assert limit_s(idle, Targets(ttft_s=0.5, itl_s=0.1)) == 0.5
    held = limit_s(idle, Targets(ttft_s=0.5, itl_s=0.025))
    assert held == pytest.approx(0.98 * 0.5 - (0.03 - 0.025)), "some of it is for the gap after it"
    long = Forecast(2.0, 2.0, 0.0, 2.0)
    assert limit_s(long, Targets(ttft_s=0.5)) == LONG * 2.0, "an idle service refuses nobody"


def test_what_would_be_late_is_refused_at_once_and_told_when_it_would_not_be() -> None:
    bench = known("p0", "d0", targets=CHAT)
    refusals = [ask(bench, f"r{number}") for number in range(9)]
    taken = [number for number, refusal in enumerate(refusals) if refusal is None]
    assert taken == list(range(5)), "five prompts of 76 ms, and half a step, are within half a second"
    refused = refusals[5]
    assert refused is not None and refused.error == "NotAdmitted" and "chat" in refused.reason
    assert 0 < refused.retry_after_s < 0.2
    assert len(bench.cluster.tracker) == 5
    bench.now += refused.retry_after_s + 0.001
    assert ask(bench, "again") is None, "it was an honest time"


def test_who_was_promised_nothing_is_refused_by_no_forecast() -> None:
    bench = known("p0", "d0", targets=CHAT)
    assert [ask(bench, f"r{n}", tier="default") for n in range(20)] == [None] * 20
    assert ask(bench, "chat") is None, "by the policy it is before them"


def test_a_worse_class_is_not_ahead_of_a_better_one() -> None:
    bench = known("p0", "d0", targets=CHAT)
    for number in range(20):
        ask(bench, f"r{number}", tier="default", priority=1)
    assert ask(bench, "chat") is None


def test_where_step_times_are_not_known_nobody_is_refused() -> None:
    bench = known("p0", "d0", targets=CHAT)
    bench.join("p1")
    assert [ask(bench, f"r{n}") for n in range(20)] == [None] * 20


def test_a_long_prompt_is_taken_by_an_idle_service_and_not_by_a_busy_one() -> None:
    bench = known("p0", "d0", targets=CHAT)
    assert ask(bench, "long", 500) is None
    assert ask(bench, "longer", 500) is not None


def test_an_idle_service_refuses_nobody_however_late_the_last_ones_were() -> None:
    """Who is refused corrects no forecast, so it would stay so for ever."""
    bench = known("p0", "d0", targets=CHAT)
    for number in range(12):
        assert ask(bench, f"r{number}", 200) is None
        bench.now += 3.0  # a machine that stood still
        bench.front(Progress(((RequestId(f"r{number}"), 0, (1,)),)))
        bench.front(RequestFinished(RequestId(f"r{number}"), "stop"))
    assert ask(bench, "idle", 400) is None
    assert ask(bench, "behind", 400) is not None


def test_rows_that_are_all_taken_are_waited_for() -> None:
    """Eight answers of 500 tokens at 18 ms: nobody leaves within half a second; near their end, one does."""
    bench = known("p0", "d0", targets=CHAT)
    for number in range(8):
        name = f"r{number}"
        bench.submit(request(name, 4, 500, tier="default", first_id=100 * number))
        bench.front(Progress(((RequestId(name), 0, (1,)),)))
    assert bench.cluster.num_waiting() == 0
    refused = ask(bench, "chat", 16)
    assert refused is not None and refused.retry_after_s > 5
    bench.front(Progress(((RequestId("r3"), 1, tuple(range(490))),)))
    assert ask(bench, "chat2", 16) is None
    bench.front(RequestFinished(RequestId("r4"), "stop"))


def of_tenant(bench: ClusterBench, name: str, tenant: str) -> str | None:
    """Why it is refused."""
    bench.fronts.clear()
    asked = request(name, 64, tier="chat", first_id=sum(name.encode()) * 100)
    bench.submit(replace(asked, tenant=tenant, deadline_s=0.5))
    said = bench.fronts[0]
    return said.reason if isinstance(said, Rejected) else None


def test_who_would_go_before_others_and_make_them_miss_is_not_let_in() -> None:
    """Another tenant has had nothing and goes before the last of five, all promised: one of those would be sixth."""
    bench = known("p0", "d0", targets=CHAT)
    assert [of_tenant(bench, f"a{number}", "a") for number in range(5)] == [None] * 5
    why = of_tenant(bench, "b", "b")
    assert why is not None and "others" in why
    with_slack = known("p0", "d0", targets=CHAT)
    assert [of_tenant(with_slack, f"a{number}", "a") for number in range(4)] == [None] * 4
    assert of_tenant(with_slack, "b", "b") is None


def test_better_classes_go_on_coming() -> None:
    """Half of the worker's time went to them of late: what is forecast of a worse class takes twice as long."""
    bench = known("p0", "d0", targets={"chat": Targets(ttft_s=0.5), "slow": Targets(ttft_s=0.31)})
    for number in range(200):
        name = f"r{number}"
        bench.submit(request(name, 64, tier="chat", first_id=100_000 + 100 * number))
        bench.front(Progress(((RequestId(name), 0, (1,)),)))
        bench.front(RequestFinished(RequestId(name), "stop"))
        bench.now += 0.15
    assert [ask(bench, f"slow{n}", 64, "slow", priority=1) is None for n in range(3)] == [True, False, False]


# ---------------------------------------------------------------- how forecasts did


def test_forecasts_are_corrected_by_what_came_of_them_within_bounds() -> None:
    correction = Correction()
    assert correction.factor(0.0, local=True) == FIRST_CORRECTION
    for number in range(64):
        correction.observed(1.2 + 0.1 * (number % 2), 1.0, 9.0, 0.0, local=True)
    assert correction.factor(1.0, local=True) == pytest.approx(1.3), "most of them would have come true"
    assert correction.factor(1.0, local=False) == FIRST_CORRECTION, "of the other way nothing is known"
    for _ in range(400):
        correction.observed(9.0, 1.0, 10.0, 2.0, local=True)
    assert correction.factor(2.0, local=True) == MOST_CORRECTION
    for _ in range(400):
        correction.observed(0.1, 1.0, 10.0, 3.0, local=True)
    assert correction.factor(3.0, local=True) == 1 / MOST_CORRECTION
    assert correction.factor(3.1 + LATELY_S, local=True) == FIRST_CORRECTION, "nobody shows otherwise"


def test_where_many_come_too_late_those_nearest_to_the_limit_are_taken_in_no_more() -> None:
    """One in ten took half as long again, each time, and all those were late: of a hundred, four may be."""
    correction = Correction()
    for number in range(100):
        late = number % 10 == 0
        correction.observed(1.5 if late else 1.0, 1.0, 1.2 + number / 1000 if late else 2.0, 0.0, local=False)
    assert correction.factor(0.0, local=False) == pytest.approx(1.25), (
        "six of the ten would have been refused"
    )
    assert correction.factor(0.0, local=True) == pytest.approx(1.25), "whichever way they go"
    for _ in range(100):
        correction.observed(1.0, 1.0, 1.3, 1.0, local=False)
    assert correction.factor(1.0, local=False) == pytest.approx(1.0)


def test_what_was_forecast_is_the_plan_of_those_that_were_promised_a_time() -> None:
    bench = known("p0", "d0", targets=CHAT)
    ask(bench, "a")
    tracked = bench.cluster.tracker.get(RequestId("a"))
    assert tracked is not None and tracked.plan is False and tracked.prefill == "p0"
    assert ask(bench, "idle", 16, "other") is None
    other = bench.cluster.tracker.get(RequestId("idle"))
    assert other is not None and other.plan is None, "nothing was promised"


def test_first_tokens_that_come_correct_the_next_forecast() -> None:
    bench = known("p0", "d0", targets=CHAT)
    for number in range(40):
        name = f"r{number}"
        assert ask(bench, name, 128) is None
        bench.now += 0.30  # twice what was forecast
        bench.front(Progress(((RequestId(name), 0, (1,)),)))
        bench.front(RequestFinished(RequestId(name), "stop"))
    taken = sum(ask(bench, f"s{number}") is None for number in range(9))
    assert taken == 2, "half as many as by the step times alone"


def test_a_burst_of_a_better_class_keeps_nobody_of_a_worse_one_out_for_longer_than_it_could_last() -> None:
    """40 prompts of 76 ms all at once, and a second later one of a worse class, two seconds of them still before it:
    taken for a class that goes on so for ever, it was refused for 20 s. As many may come again, and no more."""
    bench = known("p0", "d0", targets={"bulk": Targets(ttft_s=6.0), "swift": Targets(ttft_s=3.0)})
    for number in range(40):
        bench.submit(request(f"r{number}", 64, first_id=100_000 + 100 * number))
    for number in range(13):
        bench.now += 0.076
        bench.front(Progress(((RequestId(f"r{number}"), 0, (1,)),)))
        bench.front(RequestFinished(RequestId(f"r{number}"), "stop"))
    assert bench.cluster.num_waiting() > 20
    assert ask(bench, "bulk", 64, "bulk", priority=1) is None
    refused = ask(bench, "swift", 64, "swift", priority=1)
    assert refused is not None and 0.5 < refused.retry_after_s < 3.0
