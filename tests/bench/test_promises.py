"""What tiers are promised, in virtual time: beside a flood, over capacity, and with pools that balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from bench.promises import scenarios
from bench.promises.asked import Asked, Told, judged
from bench.promises.counterfactual import would_have_met
from bench.promises.real import capacity_of
from bench.promises.report import tokens_per_s
from bench.promises.virtual import DECODE_STEPS, PREFILL_STEPS, Service, VirtualRun, run
from coordinator.targets import targets_of

CAPACITY = capacity_of(PREFILL_STEPS, DECODE_STEPS, 1, 1, 16)
SECONDS = 20.0
CHAT = targets_of(scenarios.OVERLOAD_TIERS["chat"])


def test_chat_keeps_its_promises_beside_a_flood_that_keeps_its_throughput() -> None:
    service = Service(tiers=scenarios.BESIDE_TIERS)
    alone = run(service, scenarios.flood(CAPACITY, SECONDS, 3), SECONDS)
    both = run(service, scenarios.beside(CAPACITY, SECONDS, 3), SECONDS)
    chat = judged(both, "interactive", service.targets["interactive"])
    assert chat.asked >= 8 and chat.refused == 0
    assert chat.first_tokens.value >= 0.95 and chat.gaps.value >= 0.95
    assert tokens_per_s(both, 3.0, SECONDS) >= 0.85 * tokens_per_s(alone, 3.0, SECONDS)
    assert {one.outcome for one in both} == {"ok"}, "of the flood too nobody was refused by a forecast"


# Every prompt goes by way of the prefill pool here: with two ways the forecast is of the worse one.
ONE_WAY = Service(tiers=scenarios.OVERLOAD_TIERS, local_prefill=False)


@cache
def overloaded() -> list[Told]:
    return run(ONE_WAY, scenarios.overload(CAPACITY, SECONDS, 1), SECONDS)


def test_over_capacity_those_taken_in_keep_their_targets_and_refusals_are_immediate() -> None:
    told = overloaded()
    of = judged(told, "chat", CHAT)
    assert of.refused > 0.3 * of.asked and of.asked - of.refused > 40
    assert of.first_tokens.value >= 0.95 and of.gaps.value >= 0.95
    assert all(one.end_s == one.asked.at_s for one in told if one.outcome == "refused")
    without = run(replace(ONE_WAY, refuse_late=False), scenarios.overload(CAPACITY, SECONDS, 1), SECONDS)
    assert judged(without, "chat", CHAT).first_tokens.value < 0.3, (
        "the load is no overload: the test is blunt"
    )


def test_with_decode_workers_that_compute_prompts_too_more_are_taken_in_and_promises_are_kept() -> None:
    told = run(replace(ONE_WAY, local_prefill=True), scenarios.overload(CAPACITY, SECONDS, 1), SECONDS)
    of, one_way = judged(told, "chat", CHAT), judged(overloaded(), "chat", CHAT)
    assert of.asked - of.refused > 1.2 * (one_way.asked - one_way.refused)
    assert of.first_tokens.value >= 0.95 and of.gaps.value >= 0.95


def test_of_those_refused_hardly_one_would_have_been_in_time() -> None:
    met, sampled = would_have_met(ONE_WAY, overloaded(), 12)
    assert sampled == 12 and met <= 1


def test_who_comes_back_when_told_to_is_taken_in() -> None:
    """The crowd stays away meanwhile: the time that each of the last ones was told is honest."""
    told = overloaded()
    refused = [one for one in told if one.outcome == "refused"][-1]
    virtual = VirtualRun(ONE_WAY)
    before = [one.asked for one in told if one.asked.at_s <= refused.asked.at_s]
    back = Asked(10_000, refused.asked.at_s + refused.retry_after_s + 0.05, "chat", "crowd", 900, 16)
    virtual.ask([*before, back])
    again = virtual.run(back.at_s)
    assert again[-1].asked.index == 10_000 and again[-1].outcome == "ok"


def computed_locally(told: Sequence[Told], virtual: VirtualRun) -> float:
    return virtual.cluster.workers["decode-0"].node.records.counters.total("local_prefill_tokens_total")  # type: ignore[index]


def test_pools_balance_and_do_not_take_turns() -> None:
    """Prompts that prefill alone cannot take: decode workers take a part of them, and more are served in time."""
    tiers = scenarios.SWING_TIERS
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
