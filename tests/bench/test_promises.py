"""What tiers are promised, in virtual time: beside a flood, over capacity, and with pools that balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from bench.promises import scenarios
from bench.promises.asked import Asked, Told, judged, together
from bench.promises.counterfactual import calibrated, slower, would_have_met
from bench.promises.real import capacity_of
from bench.promises.report import tokens_per_s
from bench.promises.virtual import DECODE_STEPS, PREFILL_STEPS, Service, VirtualRun, run
from common.request import RequestId
from coordinator.targets import Targets, targets_of

CAPACITY = capacity_of(PREFILL_STEPS, DECODE_STEPS, 1, 1, 16)
SECONDS = 20.0


def test_chat_keeps_its_promises_beside_a_flood_that_keeps_its_throughput() -> None:
    service = Service(tiers=scenarios.beside_tiers(PREFILL_STEPS, DECODE_STEPS, 16))
    assert service.targets["interactive"] == Targets(ttft_s=1.0, itl_s=0.1), "what a person would want"
    alone = run(service, scenarios.flood(CAPACITY, SECONDS, 3), SECONDS)
    both = run(service, scenarios.beside(CAPACITY, SECONDS, 3), SECONDS)
    chat = judged(both, "interactive", service.targets["interactive"])
    assert chat.asked >= 8 and chat.refused == 0
    assert chat.first_tokens.value >= 0.95 and chat.gaps.value >= 0.95
    assert tokens_per_s(both, 3.0, SECONDS) >= 0.85 * tokens_per_s(alone, 3.0, SECONDS)
    assert {one.outcome for one in both} == {"ok"}, "of the flood too nobody was refused by a forecast"


TIERS = scenarios.overload_tiers(PREFILL_STEPS, DECODE_STEPS, 16)
CHAT = targets_of(TIERS["chat"])
SERVICE = Service(tiers=TIERS)
WHOLE = scenarios.with_local_prefill(CAPACITY, DECODE_STEPS, TIERS["chat"], 16)


FIRST = 30
"""Until so many came, nobody knows how long hand-overs take under such a load."""


@cache
def overloaded(seed: int = 2) -> list[Told]:
    return run(SERVICE, scenarios.overload(WHOLE, SECONDS, seed), SECONDS)


def test_over_capacity_those_taken_in_keep_their_targets_and_refusals_are_immediate() -> None:
    told = overloaded()
    of = judged(told[FIRST:], "chat", CHAT)
    assert of.refused > 0.5 * of.asked and of.asked - of.refused > 80
    assert of.first_tokens.value >= 0.96 and of.gaps.value >= 0.999 and of.whole.value >= 0.95
    assert all(one.end_s == one.asked.at_s for one in told if one.outcome == "refused")
    without = run(replace(SERVICE, refuse_late=False), scenarios.overload(WHOLE, 10.0, 2), 10.0)
    assert judged(without, "chat", CHAT).first_tokens.value < 0.3, (
        "the load is no overload: the test is blunt"
    )


def test_of_those_refused_few_would_have_been_in_time() -> None:
    """By replays in which those who were taken in have their first tokens when they had them. `bench.promises` wants a
    tenth at most of many: of four seeds 10 to 20 of 200. While each might go another way than was forecast for it, it
    was a sixth to a quarter; with a forecast of the worse way a half."""
    verdict = would_have_met(SERVICE, overloaded(), 24)
    assert verdict.sampled == 24 and verdict.met <= 5
    assert len(verdict.off_s) > 40 and verdict.mostly_within_s < 0.05


def test_a_replay_follows_a_machine_that_is_slower_than_it_says() -> None:
    slow = replace(SERVICE, prefill_steps=slower(PREFILL_STEPS, 1.2), decode_steps=slower(DECODE_STEPS, 1.2))
    told = run(slow, scenarios.overload(WHOLE, 6.0, 1), 6.0)
    assert calibrated(SERVICE, told)[1] == pytest.approx(1.2, rel=0.05)


def test_who_comes_back_when_told_to_is_taken_in() -> None:
    """The crowd stays away meanwhile: the time that each of the last ones was told is honest."""
    told = overloaded()
    refused = [one for one in told if one.outcome == "refused"][-1]
    virtual = VirtualRun(SERVICE)
    before = [one.asked for one in told if one.asked.at_s <= refused.asked.at_s]
    at_s = refused.asked.at_s + refused.retry_after_s + 0.05
    back = replace(refused.asked, index=10_000, at_s=at_s)
    virtual.ask([*before, back])
    again = virtual.run(back.at_s)
    assert again[-1].asked.index == 10_000 and again[-1].outcome == "ok"


def computed_locally(told: Sequence[Told], virtual: VirtualRun) -> float:
    return virtual.cluster.workers["decode-0"].node.records.counters.total("local_prefill_tokens_total")  # type: ignore[index]


def test_pools_balance_and_do_not_take_turns() -> None:
    """Prompts that prefill alone cannot take: decode workers take a part of them, and more are served in time."""
    tiers = scenarios.swing_tiers(PREFILL_STEPS, DECODE_STEPS, 16)
    assert tiers == scenarios.SWING_TIERS, "what a person would want"
    rate = 1.3 * CAPACITY.requests_per_s(900, 16)
    load = [
        one
        for one in scenarios.swing({"prompt-heavy": rate, "answer-heavy": 0.01}, 30.0, 5)
        if one.at_s < 10.0
    ]
    met = {}
    for local in (True, False):
        virtual = VirtualRun(Service(tiers=tiers, local_prefill=local))
        warm = computed_locally((), virtual)
        virtual.ask(load)
        told = virtual.run(10.0)
        met[local] = sum(one.meets(targets_of(tiers["chat"])) for one in told)
        took = computed_locally(told, virtual) - warm
        total = sum(one.asked.prompt_tokens for one in told if one.outcome == "ok")
        assert (0.1 < took / total < 0.7) if local else took == 0
    assert met[True] > 1.05 * met[False]


def test_under_a_steady_load_both_pools_work_side_by_side() -> None:
    """Neither stands while the other has all: of any eight in a row each computes some."""
    rate = 0.9 * WHOLE.requests_per_s(900, 32)
    virtual = VirtualRun(SERVICE)
    virtual.ask([Asked(n, n / rate, "chat", "crowd", 900, 32) for n in range(int(rate * 15.0))])
    told = virtual.run(15.0)
    assert judged(told[FIRST // 3 :], "chat", CHAT).whole.value >= 0.95
    known = [virtual.cluster.cluster.tracker.known(RequestId(f"r{one.asked.index}")) for one in told]
    local = [one.prefill is None for one in known if one is not None and one.decode is not None]
    shares = [sum(local[start : start + 8]) for start in range(8, len(local) - 8)]
    assert len(shares) > 30 and min(shares) >= 1 and max(shares) <= 6, shares


def test_a_better_class_that_keeps_coming_does_not_make_those_miss_who_were_let_in_before_it() -> None:
    """Once it is known how much that one takes: without that, half of them miss."""
    tiers = {
        "chat": TIERS["chat"].model_copy(update={"priority": 0}),
        "batch": TIERS["chat"].model_copy(update={"priority": 1, "ttft_ms": 3000.0}),
    }
    each = scenarios.overload(WHOLE, SECONDS, 2)
    chats = [one for one in each if one.index % 5 == 0]
    rest = [replace(one, tier="batch", tenant="batch") for one in each if one.index % 5]
    told = run(Service(tiers=tiers), together(chats, rest), SECONDS)
    chat, batch = (
        judged([one for one in told if one.asked.at_s > 4.0], name, targets_of(tier))
        for name, tier in tiers.items()
    )
    assert chat.first_tokens.value >= 0.95 and chat.refused <= 0.05 * chat.asked
    assert batch.first_tokens.value >= 0.85 and batch.asked - batch.refused >= 10
