"""Who is put out, told rule by rule; and that a pool far too small for its load does not do the same work for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from common.lifecycle import Phase
from common.request import Key
from common.sequence import Sequence
from decode_node.preemption import MAX_VICTIM, Preemption
from tests.common.stepping import attempt, prompt, request
from tests.decode_node.test_scheduler import Bench


def holder(arrival: int, *, priority: int = 0, tenant: str = "", preemptions: int = 0) -> Sequence:
    wanted = replace(request(f"r{arrival}", prompt(4), priority=priority), tenant=tenant)
    seq = Sequence(wanted, attempt(), b"", arrival, Phase.QUEUED, 0.0)
    seq.preemptions = preemptions
    return seq


SERVED = {"heavy": 900.0, "light": 10.0}


def out(*holders: Sequence) -> int:
    """The victim's arrival; the order in which they are shown makes no difference."""
    rule = Preemption(lambda seq: SERVED.get(seq.request.tenant, 0.0))
    found = {rule.victim(list(order)).arrival for order in (holders, holders[::-1])}
    assert len(found) == 1
    return found.pop()


def test_the_lowest_class_first_whoever_else_it_may_be() -> None:
    low = holder(1, priority=5, tenant="light", preemptions=MAX_VICTIM)
    assert out(low, holder(2, priority=0, tenant="heavy"), holder(3, priority=1)) == 1


def test_then_the_tenant_furthest_over_its_share() -> None:
    assert out(holder(1, tenant="heavy"), holder(2, tenant="light"), holder(3)) == 1


def test_then_who_came_last() -> None:
    assert out(holder(1), holder(3), holder(2)) == 3
    assert out(holder(1, tenant="heavy"), holder(2, tenant="heavy"), holder(3, tenant="light")) == 2


def test_who_was_a_victim_so_often_is_spared_while_there_are_others_of_its_class() -> None:
    spared = holder(9, tenant="heavy", preemptions=MAX_VICTIM)
    assert out(spared, holder(1, preemptions=MAX_VICTIM - 1), holder(2, tenant="light")) == 2
    others = [holder(n, tenant="light", preemptions=MAX_VICTIM + n) for n in range(3)]
    assert out(spared, *others) == 9, "the first to come is the one that stays, whatever its tenant had"


@given(st.integers(2, 6), st.integers(0, 1 << 16))
def test_counters_that_turn_every_time_cannot_put_each_of_them_out_for_ever(count: int, seed: int) -> None:
    """All come back at once, each time: from some time on there is one that stays, so it comes to its end."""
    chance = random.Random(seed)
    rule = Preemption(lambda _: chance.random())
    holders = [holder(arrival) for arrival in range(count)]
    victims = []
    for _ in range(MAX_VICTIM * count + 20):
        victims.append(rule.victim(holders))
        victims[-1].preemptions += 1
    assert victims.count(holders[0]) <= MAX_VICTIM
    assert holders[0] not in victims[MAX_VICTIM * count :]


# ---------------------------------------------------------------- in the scheduler


class Taxed(Bench):
    """Tenants by the first letter of the name; what was served is said by the test."""

    def __init__(self, num_blocks: int, served: dict[str, float], max_num_seqs: int = 8) -> None:
        super().__init__(num_blocks, max_num_seqs=max_num_seqs, caching=False)
        self.served = served
        self.scheduler.giving_way._preemption = Preemption(lambda seq: self.served[seq.key[0][0]])


def test_story_of_two_tenants() -> None:
    """1 one of the light and two of the heavy tenant fill the pool  2 a heavy one is put out, though the light one came
    last  3 all answers are exact."""
    bench = Taxed(12, {"h": 50.0, "l": 1.0})
    keys = [bench.transferred(name, prompt(6, 100 * n), 20) for n, name in enumerate(("h0", "h1", "l0"))]
    while not bench.scheduler.giving_way.preemptions:
        bench.step()
    (put_out,) = [seq for seq in bench.scheduler.held.sequences() if seq.life.phase is Phase.PREEMPTED]
    assert put_out.key == keys[1]
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_what_was_served_here_is_what_the_order_counts() -> None:
    """The heavy tenant has two that talk, the light one has one, which came last: one of the two goes."""
    bench = Bench(24, caching=False)
    keys: list[Key] = []
    for name, tenant in (("h0", "heavy"), ("h1", "heavy"), ("l0", "light")):
        ids = prompt(6, 100 * len(keys))
        asked = replace(request(name, ids, 60), tenant=tenant)
        seq = bench.scheduler.add(asked, attempt(), b"", bench.now)
        keys.append(bench._expect(seq, ids, 60))
        for _ in range(4):
            bench.step()
    while not bench.scheduler.giving_way.preemptions:
        bench.step()
    (put_out,) = [seq for seq in bench.scheduler.held.sequences() if seq.life.phase is Phase.PREEMPTED]
    assert put_out.key == keys[1]
    bench.to_the_end()
    bench.check_exact_and_empty()


tenants = st.sampled_from(("a", "b", "c"))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(tenants, st.integers(0, 2), st.integers(1, 40), st.integers(1, 30)), max_size=14),
    st.data(),
)
def test_whatever_the_counters_say_everybody_ends(
    asks: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    """Seventy tokens are the longest, of eighty that fit. Counters change at will in every step, and every order of
    coming in; one class is put out by itself and by higher ones only."""
    chance = random.Random(data.draw(st.integers(0, 1 << 16)))
    bench = Taxed(20, {"a": 0.0, "b": 0.0, "c": 0.0})
    keys: list[Key] = []
    for index, (tenant, priority, tokens, answer) in enumerate(asks):
        keys.append(bench.add(f"{tenant}{index}", prompt(tokens, 100 * index), answer, priority=priority))
        bench.step()
        bench.served = {name: chance.random() for name in "abc"}
    for _ in range(3000):
        if not len(bench.scheduler.held):
            break
        classes = {seq.key: seq.request.priority for seq in bench.scheduler.held.sequences()}
        before = {seq.key: seq.preemptions for seq in bench.scheduler.held.sequences()}
        bench.served = {name: chance.random() for name in "abc"}
        bench.step()
        for seq in bench.scheduler.held.sequences():
            if seq.preemptions > before[seq.key]:
                decoding = [s for s in bench.scheduler.held.sequences() if s.life.phase is Phase.DECODING]
                assert all(classes[s.key] <= classes[seq.key] for s in decoding)
    assert not len(bench.scheduler.held), "it does not come to an end"
    bench.check_exact_and_empty()


@pytest.mark.parametrize("answer", [12, 40])
def test_work_lost_at_half_the_pool_that_is_wanted_is_little(answer: int) -> None:
    bench = Bench(num_blocks=8 * (8 + answer) // 4 // 2, max_num_seqs=8, caching=False)
    for number in range(80):
        bench.add(f"r{number}", prompt(8, 50 * number), answer)
    bench.to_the_end()
    bench.check_exact_and_empty()
    computed = 80 * (8 + answer)
    assert bench.scheduler.giving_way.lost_tokens <= 0.05 * computed
    assert max(bench.preempted.values()) <= MAX_VICTIM
