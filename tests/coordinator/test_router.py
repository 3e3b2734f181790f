"""The account of what each worker was given, and what is ahead there."""

from __future__ import annotations

from dataclasses import replace

from common.messages import Sender
from common.request import Incarnation, RequestId, WorkerId
from coordinator.registry import Registry, Worker
from coordinator.router import STEPS_AHEAD, Router, Share, least
from tests.coordinator.cluster_bench import card

P0, D0 = WorkerId("p0"), WorkerId("d0")


def workers(*names: str) -> list[Worker]:
    registry = Registry(tokenizer_hash=None, fronts={})
    for name in names:
        registry.register(card(name), Sender(name, Incarnation(1)), 0.0)
    return registry.all()


def share(
    tokens: int, blocks: int = 1, seconds: float = 0.0, number: int = 0, itl_s: float | None = None
) -> Share:
    return Share(tokens, blocks, seconds, number, 10, itl_s)


def test_prefill_takes_two_steps_ahead_and_always_one() -> None:
    router, (p0,) = Router(), workers("p0")
    assert router.may_prefill(p0, 10_000, 0), "an idle one takes whatever fits the model"
    router.assign(RequestId("a"), P0, None, share(60), 0.0)
    router.assign(RequestId("b"), P0, None, share(40), 0.0)
    assert router.may_prefill(p0, STEPS_AHEAD * 64 - 100, 0)
    assert not router.may_prefill(p0, STEPS_AHEAD * 64 - 99, 0)


def test_BR_067_a_prompt_waits_for_none_that_is_much_longer() -> None:
    router, (p0,) = Router(), workers("p0")
    router.assign(RequestId("long"), P0, None, share(10_000), 0.0)
    for tokens in (1, 64, 65, 2499):
        assert router.may_prefill(p0, tokens, 0) and not router.has_long(p0, tokens, 0)
    assert not router.may_prefill(p0, 2500, 0) and router.has_long(p0, 2500, 0)
    router.assign(RequestId("short"), P0, None, share(60), 0.0)
    assert router.may_prefill(p0, 64, 0)
    router.assign(RequestId("other"), P0, None, share(60), 0.0)
    assert not router.may_prefill(p0, 15, 0), "two steps"
    assert router.may_prefill(p0, 8, 0), "those are much longer than this one"
    router.release(RequestId("other"), P0, None)
    router.computed(RequestId("long"), P0, 1.0)
    assert router.may_prefill(p0, 2500, 0) and not router.has_long(p0, 2500, 0)


def test_work_of_a_lower_class_is_ahead_of_nobody_of_a_higher_one() -> None:
    router, (p0,) = Router(), workers("p0")
    for name in ("a", "b"):
        router.assign(RequestId(name), P0, None, share(64, number=5), 0.0)
    assert not router.may_prefill(p0, 60, 5) and not router.may_prefill(p0, 60, 6)
    assert router.may_prefill(p0, 64, 4) and router.may_prefill(p0, 10_000, 4)


def test_who_starts_whole_batches_is_given_all_that_its_batch_holds() -> None:
    registry = Registry(tokenizer_hash=None, fronts={})
    registry.register(replace(card("d0"), whole_batches=True), Sender("d0", Incarnation(1)), 0.0)
    router, (d0,) = Router(), registry.all()
    for number in range(8):
        assert router.may_prefill(d0, 1000, 0)
        router.assign(RequestId(f"r{number}"), D0, D0, share(1000), 0.0)
    assert router.batch_share(d0) == 1.0


def test_who_is_to_be_avoided_is_picked_only_alone_and_ties_go_by_registration() -> None:
    pool = workers("p0", "p1")
    assert least(pool, (), lambda worker: 0.0) is pool[0]
    assert least(pool, {P0}, lambda worker: 0.0) is pool[1]
    assert least(pool, {P0, WorkerId("p1")}, lambda worker: 0.0) is pool[0]
    assert least([], (), lambda worker: 0.0) is None


def test_everything_given_back_leaves_nothing() -> None:
    router = Router()
    ids = [RequestId(f"r{n}") for n in range(5)]
    for n, request_id in enumerate(ids):
        router.assign(request_id, P0, D0, share(10 * n, n, itl_s=0.1 * n or None), 0.0)
    router.assign(RequestId("r3"), P0, D0, share(7), 0.0)  # assigned anew: counted once
    assert router.tokens_ahead(P0) == 0 + 10 + 20 + 7 + 40 and router.rows(D0).blocks == 0 + 1 + 2 + 1 + 4
    assert router.rows(D0).tightest_itl_s == 0.1
    router.release(RequestId("r1"), P0, D0)
    assert router.rows(D0).tightest_itl_s == 0.2
    assert not router.empty
    for request_id in ids:
        for _ in range(2):
            router.release(request_id, P0, D0)
    assert router.empty and router.tokens_ahead(P0) == 0 and router.rows(D0).tightest_itl_s is None


def test_seconds_ahead_are_those_of_its_class_less_what_should_be_done() -> None:
    """1 two prompts of a second each  2 half a second later  3 the first is computed, the second begins  4 it takes
    longer than it should: nothing is left of it, and never less."""
    router = Router()
    router.assign(RequestId("a"), P0, None, share(10, seconds=1.0), 5.0)
    router.assign(RequestId("b"), P0, None, share(10, seconds=1.0), 5.0)
    prompts = router.prompts(P0)
    assert prompts.seconds_ahead(0, 10, 1.0, 5.0) == 2.0
    assert prompts.seconds_ahead(0, 10, 1.0, 5.5) == 1.5
    router.computed(RequestId("a"), P0, 5.75)
    assert prompts.seconds_ahead(0, 10, 1.0, 6.0) == 0.75
    assert prompts.seconds_ahead(0, 10, 1.0, 9.0) == 0.0


def test_a_better_class_does_not_wait_for_a_worse_one() -> None:
    router = Router()
    router.assign(RequestId("batch"), P0, None, share(10, seconds=3.0, number=5), 0.0)
    router.assign(RequestId("chat"), P0, None, share(10, seconds=1.0), 0.0)
    prompts = router.prompts(P0)
    assert prompts.seconds_ahead(0, 10, 1.0, 0.5) == 1.0, "what is done meanwhile may be of the other"
    assert prompts.seconds_ahead(5, 10, 1.0, 0.5) == 3.5


def test_a_much_longer_prompt_takes_as_long_again_as_who_shares_steps_with_it() -> None:
    """Once it is late, or if it is never due; until it is due it goes first."""
    router = Router()
    router.assign(RequestId("long"), P0, None, replace(share(1000, seconds=10.0), due=12.0), 0.0)
    prompts = router.prompts(P0)
    assert prompts.line(0, 100, 1.0, 0.0) == [(10.0, 1000)]
    assert prompts.line(0, 100, 1.0, 9.0) == [(1.0, 1000)], "nearly done"
    assert prompts.line(0, 300, 3.0, 0.0) == [(10.0, 1000)], "not so much longer"
    router.assign(RequestId("long"), P0, None, share(1000, seconds=10.0), 0.0)
    assert prompts.line(0, 100, 1.0, 0.0) == [(1.0, 1000)]
    router.assign(RequestId("long"), P0, None, replace(share(1000, seconds=10.0), due=4.0), 0.0)
    assert prompts.line(0, 100, 1.0, 0.0) == [(5.0, 1000)]
