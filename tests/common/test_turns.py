"""Order on a worker, and how one step's prompt tokens are shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.batching import SCORED_COST
from common.lifecycle import Phase
from common.ordering import AGEING_S, POLICIES, PolicyName
from common.request import SamplingParams, pack_ids
from common.sequence import Sequence
from common.step_budget import StepBudget
from common.turns import Turns
from tests.common.stepping import attempt, prompt, request

_arrivals = iter(range(1, 10**6))


def sequence(
    turns: Turns,
    name: str,
    length: int = 10,
    *,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    deadline_s: float | None = None,
    now: float = 0.0,
) -> Sequence:
    made = replace(
        request(name, prompt(length), priority=priority), tenant=tenant, weight=weight, deadline_s=deadline_s
    )
    seq = Sequence(made, attempt(), b"", next(_arrivals), Phase.QUEUED, now)
    turns.enter(seq, now)
    return seq


def names(seqs: list[Sequence]) -> list[str]:
    return [str(seq.key[0]) for seq in seqs]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["low", "a", "b", "due", "a2"]),
        ("priority", ["a", "b", "due", "a2", "low"]),
        ("fair", ["due", "a", "b", "a2", "low"]),
        ("edf", ["due", "a", "b", "a2", "low"]),
    ],
)
def test_each_policy(policy: PolicyName, expected: list[str]) -> None:
    turns = Turns(POLICIES[policy])
    standing = [
        sequence(turns, "low", priority=1, tenant="a"),
        sequence(turns, "a", tenant="a"),
        sequence(turns, "b", tenant="b"),
        sequence(turns, "due", tenant="b", deadline_s=1.0),
        sequence(turns, "a2", tenant="a"),
    ]
    found = names(turns.in_turn(standing, 0.0))
    if policy == "fair":
        assert found[0] == "due" and found[-1] == "low" and found.index("a") < found.index("b")
    else:
        assert found == expected


def test_lanes_are_served_by_what_they_had_and_by_weight() -> None:
    turns = Turns(POLICIES["fair"])
    a = [sequence(turns, f"a{n}", 100, tenant="a") for n in range(3)]
    b = [sequence(turns, f"b{n}", 100, tenant="b", weight=4.0) for n in range(3)]
    assert names(turns.in_turn([*a, *b], 0.0)) == ["a0", "b0", "b1", "b2", "a1", "a2"]
    turns.computes(b[0], 100, 0.0)
    b[1].tokens += [7] * 60
    turns.count_outputs(b)
    turns.count_outputs(b)  # once each
    turns.computes(a[0], 90, 0.0)
    assert names(turns.in_turn([*a[1:], *b[1:]], 0.0))[0] == "b1", "25 + 30 against 90"
    b[1].tokens += [7] * 140
    turns.count_outputs(b)
    assert names(turns.in_turn([*a[1:], *b[1:]], 0.0))[0] == "a1", "125 against 90"


def test_a_tenant_that_was_away_is_lifted() -> None:
    turns = Turns(POLICIES["fair"])
    stays = [sequence(turns, f"s{n}", 10, tenant="s") for n in range(20)]
    turns.in_turn(stays, 0.0)
    for seq in stays[:10]:
        turns.computes(seq, 10, 0.0)
    turns.in_turn(stays[10:], 0.0)
    comes = [sequence(turns, f"c{n}", 10, tenant="c") for n in range(10)]
    assert sum(name[0] == "c" for name in names(turns.in_turn([*stays[10:], *comes], 0.0))[:10]) == 5


def test_what_is_computed_again_is_not_charged() -> None:
    turns = Turns(POLICIES["fair"])
    a, b = sequence(turns, "a", 50, tenant="a"), sequence(turns, "b", 50, tenant="b")
    turns.in_turn([a, b], 0.0)
    a.preemptions = 1
    turns.computes(a, 50, 0.0)
    assert names(turns.in_turn([a, b], 0.0)) == ["a", "b"]


def test_ageing_gives_one_turn_in_an_interval() -> None:
    """Two of a low class beside a high one that is always there: their chunks are AGEING_S apart."""
    turns = Turns(POLICIES["fair"])
    low = [sequence(turns, f"low{n}", 1000, priority=9) for n in range(2)]
    high = sequence(turns, "high", 10**4)
    served = []
    for tick in range(1, 260):
        now = tick / 10
        first = turns.in_turn([*low, high], now)[0]
        turns.computes(first, 16, now)
        if first is not high:
            served.append((str(first.key[0]), now))
    assert served == [(f"low{n % 2}", (n + 1) * AGEING_S) for n in range(5)]


def budget_of(tokens: int, *seqs: Sequence) -> list[tuple[str, int]]:
    budget = StepBudget(tokens, now=5.0)
    for seq in seqs:
        budget.give(seq)
    return [(str(seq.key[0]), count) for seq, count in budget.chunks()]


def test_BR_067_a_long_prompt_leaves_half_to_those_that_can_end() -> None:
    turns = Turns(POLICIES["fair"])
    long, short, other = (sequence(turns, name, size) for name, size in (("l", 1000), ("s", 20), ("o", 40)))
    low = sequence(turns, "low", 5, priority=1)
    urgent = sequence(turns, "urgent", 5, priority=-1)
    assert budget_of(100, long) == [("l", 100)]
    assert budget_of(100, long, short) == [("l", 80), ("s", 20)]
    assert budget_of(100, short, long, other) == [("s", 20), ("l", 40), ("o", 40)]
    assert budget_of(100, long, short, other) == [("l", 65), ("s", 20), ("o", 15)], (
        "half of what is left by then"
    )
    assert budget_of(100, long, low, urgent) == [("l", 95), ("urgent", 5)], (
        "nothing of it is for a lower class"
    )
    second = sequence(turns, "second", 1000)
    assert budget_of(100, long, second, short) == [("l", 80), ("s", 20)], "one after the other"
    due, late = sequence(turns, "due", 1000, deadline_s=6.0), sequence(turns, "late", 1000, deadline_s=4.0)
    assert budget_of(100, due, short) == [("due", 100)], "it may yet be in time"
    assert budget_of(100, late, short) == [("late", 80), ("s", 20)]
    assert budget_of(0, long) == [] and budget_of(1, long) == [("l", 1)]


def test_a_token_to_be_scored_takes_more_of_the_budget_and_a_step_always_gets_on() -> None:
    turns = Turns(POLICIES["fair"])
    owing = sequence(turns, "owing", 9)
    scored = replace(
        owing.request, sampling=SamplingParams(5, prompt_logprobs=0), prompt_ids=pack_ids(prompt(9))
    )
    owing = Sequence(scored, attempt(), b"", 1, Phase.QUEUED, 0.0)
    plain = sequence(turns, "plain", 2)
    assert budget_of(8 * SCORED_COST, owing, plain) == [("owing", 7), ("plain", 2)]
    assert budget_of(9 * SCORED_COST, owing, plain) == [("owing", 9)]
    assert budget_of(1, owing) == [("owing", 1)]
