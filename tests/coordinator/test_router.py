"""Routing: least loaded, by what was dispatched and has not ended."""

from __future__ import annotations

from dataclasses import replace

from common.messages import Sender
from common.request import Incarnation, RequestId, WorkerId
from coordinator.registry import Registry, Worker
from coordinator.router import STEPS_AHEAD, Router
from tests.coordinator.cluster_bench import card


def workers(*names: str, **sizes: int) -> list[Worker]:
    registry = Registry(tokenizer_hash=None, fronts={})
    for name in names:
        registry.register(card(name, blocks=sizes.get("blocks", 64)), Sender(name, Incarnation(1)), 0.0)
    return registry.all()


def picked(worker: Worker | None) -> str | None:
    return None if worker is None else str(worker.id)


def take(
    router: Router, name: str, prefill: str | None, decode: str | None, tokens: int, blocks: int
) -> RequestId:
    request_id = RequestId(name)
    router.assign(
        request_id,
        WorkerId(prefill) if prefill else None,
        WorkerId(decode) if decode else None,
        tokens,
        blocks,
    )
    return request_id


def test_prefill_by_tokens_ahead_ties_by_registration() -> None:
    router, pool = Router(), workers("p0", "p1")
    assert picked(router.pick_prefill(pool, 10, ())) == "p0"
    take(router, "a", "p0", None, 30, 0)
    assert picked(router.pick_prefill(pool, 10, ())) == "p1"
    take(router, "b", "p1", None, 40, 0)
    assert picked(router.pick_prefill(pool, 10, ())) == "p0"
    router.prefilled(RequestId("b"), WorkerId("p1"))
    assert picked(router.pick_prefill(pool, 10, ())) == "p1"


def test_prefill_takes_two_steps_ahead_and_always_one() -> None:
    router, pool = Router(), workers("p0")
    assert picked(router.pick_prefill(pool, 10_000, ())) == "p0", "an idle one takes whatever fits the model"
    take(router, "a", "p0", None, 60, 0)
    take(router, "b", "p0", None, 40, 0)
    assert picked(router.pick_prefill(pool, STEPS_AHEAD * 64 - 100, ())) == "p0"
    assert router.pick_prefill(pool, STEPS_AHEAD * 64 - 99, ()) is None


def test_a_prompt_longer_than_a_step_counts_as_one_and_is_the_only_such() -> None:
    """BR-067: what is short is given beside it."""
    router, pool = Router(), workers("p0")
    long = take(router, "long", "p0", None, 10_000, 0)
    assert picked(router.pick_prefill(pool, 64, ())) == "p0" and router.first_long_class(pool[0]) == 0
    assert router.pick_prefill(pool, 65, ()) is None, "long too"
    take(router, "short", "p0", None, 60, 0)
    assert picked(router.pick_prefill(pool, 4, ())) == "p0"
    assert router.pick_prefill(pool, 5, ()) is None, "two steps"
    router.prefilled(long, WorkerId("p0"))
    assert picked(router.pick_prefill(pool, 65, ())) == "p0" and router.first_long_class(pool[0]) > 1e9


def test_work_of_a_lower_class_is_ahead_of_nobody_of_a_higher_one() -> None:
    router, pool = Router(), workers("p0")
    for name, tokens in (("a", 10_000), ("b", 64)):
        router.assign(RequestId(name), WorkerId("p0"), None, tokens, 0, number=5)
    assert router.pick_prefill(pool, 1, (), 5) is None and router.pick_prefill(pool, 1, (), 6) is None
    assert picked(router.pick_prefill(pool, 64, (), 4)) == "p0"
    assert picked(router.pick_prefill(pool, 10_000, (), 4)) == "p0"
    router.assign(RequestId("c"), WorkerId("p0"), None, 10_000, 0, number=4)
    assert router.pick_prefill(pool, 10_000, (), 4) is None


def test_who_starts_whole_batches_is_given_a_whole_one_ahead() -> None:
    registry = Registry(tokenizer_hash=None, fronts={})
    registry.register(
        replace(card("d0", max_num_seqs=8), whole_batches=True), Sender("d0", Incarnation(1)), 0.0
    )
    router, pool = Router(), registry.all()
    for number in range(8):
        assert router.pick_prefill(pool, 1000, ()) and router.pick_decode(pool, 1, ())
        take(router, f"r{number}", "d0", "d0", 1000, 1)
    assert router.pick_decode(pool, 1, ()) is None, "and not more than one"


def test_decode_by_share_of_its_batch_and_room() -> None:
    router, pool = Router(), workers("d0", "d1", blocks=20)
    take(router, "a", None, "d0", 0, 15)
    assert picked(router.pick_decode(pool, 10, ())) == "d1"
    take(router, "b", None, "d1", 0, 5)
    take(router, "c", None, "d1", 0, 5)
    assert picked(router.pick_decode(pool, 5, ())) == "d0"
    assert picked(router.pick_decode(pool, 10, ())) == "d1", "fewer requests but no room"
    assert router.pick_decode(pool, 11, ()) is None
    router.release(RequestId("a"), None, WorkerId("d0"))
    assert picked(router.pick_decode(pool, 1000, ())) == "d0", "an idle one takes whatever the limit let in"


def test_batch_size_is_a_limit() -> None:
    router, pool = Router(), workers("d0")
    for number in range(8):
        take(router, f"r{number}", None, "d0", 0, 1)
    assert router.pick_decode(pool, 1, ()) is None


def test_who_is_to_be_avoided_is_picked_only_alone() -> None:
    router, pool = Router(), workers("p0", "p1")
    assert picked(router.pick_prefill(pool, 1, {WorkerId("p0")})) == "p1"
    assert picked(router.pick_prefill(pool, 1, {WorkerId("p0"), WorkerId("p1")})) == "p0"


def test_everything_given_back_leaves_nothing() -> None:
    router = Router()
    ids = [take(router, f"r{n}", "p0", "d0", 10 * n, n) for n in range(5)]
    take(router, "r3", "p0", "d0", 7, 1)  # assigned anew: counted once
    assert router.tokens_ahead(WorkerId("p0")) == 0 + 10 + 20 + 7 + 40
    assert not router.empty
    for request_id in ids:
        for _ in range(2):
            router.release(request_id, WorkerId("p0"), WorkerId("d0"))
    assert router.empty and router.tokens_ahead(WorkerId("p0")) == 0
