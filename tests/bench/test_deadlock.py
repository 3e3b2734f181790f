"""Tries to make the pools wait for each other: requests that each fit alone and not together, on every kind of worker.

The argument why none of these can hang is in `common/lifecycle.py`; each test here was seen to fail with its rule
broken. The whole cluster in virtual time, nothing is lost on the way: what hangs here hangs by itself.
"""

from __future__ import annotations

import itertools

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_model import continuation
from bench.virtual_worker import Shape
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids
from coordinator.placing import Placing
from coordinator.router import Router

POOL = 40  # blocks, of 16 tokens
FITS = POOL * 16
SHAPE = Shape(num_blocks=POOL, max_num_seqs=8, max_num_batched_tokens=64)
PATIENCE_S = 60.0  # half of what anybody waits for by a limit: what ends within it needed none


@pytest.fixture(autouse=True, params=["by account", "at once"])
def given_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator keeps account of what workers have room for; what they do must not hang upon that, so each
    test also runs with all of it given out at once."""
    if request.param == "at once":
        monkeypatch.setattr(Router, "may_prefill", lambda *_: True)
        monkeypatch.setattr(Placing, "rows_free", lambda *_: 1)


class Pools:
    """A cluster of small pools, and what it was asked for."""

    def __init__(self, num_prefill: int, num_decode: int, shape: Shape = SHAPE) -> None:
        self.cluster = VirtualCluster(
            seed=0,
            num_prefill=num_prefill,
            num_decode=num_decode,
            prefill_shape=shape,
            decode_shape=shape,
        )
        self.cluster.run(until=1.0)
        self._asked: list[tuple[RequestId, list[int], int]] = []

    def ask(self, prompt: list[int], max_tokens: int, priority: int = 0) -> None:
        request_id = RequestId(f"r{len(self._asked)}")
        self._asked.append((request_id, prompt, max_tokens))
        wanted = Request(request_id, pack_ids(prompt), SamplingParams(max_tokens), FRONT, priority=priority)
        self.cluster.submit(wanted)

    def all_end(self, within_s: float = PATIENCE_S) -> None:
        """Each exactly once, with the right tokens, by no limit's passing, and nothing is left."""
        cluster = self.cluster
        until = cluster.now + within_s
        while len(cluster.front) and cluster.now < until:
            cluster.run(until=cluster.now + 0.5)
        for request_id, prompt, max_tokens in self._asked:
            answer = cluster.answers[request_id]
            assert answer.end == "length", f"{request_id}: {answer.end}, {len(answer.ids)} tokens"
            assert answer.ids == continuation(prompt, max_tokens)
        cluster.run(until=cluster.now + 2.0)
        cluster.check_idle()

    def counted(self, name: str) -> float:
        """By all workers."""
        counters = (worker.node.records.counters.values for worker in self.cluster.workers.values())
        return sum(values.get(name, 0.0) for values in counters)

    def attempts(self) -> int:
        return sum(
            self.cluster.cluster.tracker.timeline(request_id, self.cluster.now)["attempts"]  # type: ignore[index]
            for request_id, _, _ in self._asked
        )


def prompt(length: int, number: int) -> list[int]:
    return [number * 1000 + index for index in range(length)]


LONG = [(560, 80), (500, 140), (620, 20), (300, 340)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_long_requests_compete_for_two_pools_of_each_kind(order: tuple[int, ...]) -> None:
    """Each takes nearly the whole of whatever pool it is in, in every order, with short ones between."""
    pools = Pools(2, 2)
    for index in order:
        length, out = LONG[index]
        pools.ask(prompt(length, index), out)
        pools.ask(prompt(20, 10 + index), 30)
    pools.all_end()


@pytest.mark.parametrize("num_prefill", [0, 1, 2])
def test_answers_outgrow_the_pool_together(num_prefill: int) -> None:
    """All are in the batch, and none can take its next block: some are put out, one goes on, and all come back."""
    pools = Pools(num_prefill, max(1, num_prefill))
    for number in range(8):
        pools.ask(prompt(60, number), 400)
    pools.all_end(within_s=200.0)
    assert pools.counted("num_preemptions_total") > 0, "the pool never filled: the test is blunt"


def test_transferred_requests_are_put_out_and_come_back() -> None:
    """BR-047: out of blocks after the transfer; it is over, so that what is lost is computed here."""
    pools = Pools(1, 1)
    for number in range(8):
        pools.ask(prompt(75, number), 150)
    pools.all_end()
    assert pools.counted("num_preemptions_total") >= 2
    assert pools.counted("local_prefill_tokens_total") > 0 and pools.attempts() == 8, (
        "each with its one attempt"
    )


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_prompts_that_fill_the_receiving_pool_part_way(num_prefill: int) -> None:
    """BR-044: the receiving pool holds one and a half of four long prompts, and a window a third of one."""
    pools = Pools(num_prefill, 1)
    for number in range(4):
        pools.ask(prompt(25 * 16 - 3, number), 20, priority=4 - number)
        pools.cluster.run(until=pools.cluster.now + 0.03)
    pools.all_end(within_s=5.0)
    assert pools.attempts() == 4, "each with its one attempt"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_two_half_cached_prompts_that_do_not_both_fit(num_prefill: int, first: int) -> None:
    """BR-050: of a pool P, 0.25 P and 0.35 P are cached beginnings of requests that take 0.8 P and 0.6 P."""
    pools = Pools(num_prefill, 1)
    for number, share in enumerate((0.25, 0.35)):
        pools.ask([*prompt(int(FITS * share), number), 9], 1 if num_prefill == 0 else 2)
        pools.all_end()
    hits = pools.counted("prefix_cache_hits_total")
    for priority, number in ((1, first), (0, 1 - first)):
        pools.ask(prompt(int(FITS * (0.8, 0.6)[number]) - 5, number), 5, priority)
        pools.cluster.run(
            until=pools.cluster.now + 0.04
        )  # the first is under way when the other one goes before it
    pools.all_end(within_s=5.0)
    assert pools.counted("prefix_cache_hits_total") > hits, "nothing was cached: the test is blunt"
    assert pools.attempts() == 4, "each with its one attempt"


def test_computed_prompts_fill_the_prefill_pool_while_nobody_takes_them() -> None:
    """A prefill worker computes nothing more, and keeps what it has; when the decode worker is there again, all go."""
    pools = Pools(1, 1)
    for number in range(6):
        pools.ask(prompt(250, number), 5)
    pools.cluster.run(until=pools.cluster.now + 0.02)
    pools.cluster.freeze("decode-0")
    pools.cluster.run(until=pools.cluster.now + 2.0)
    assert pools.cluster.workers[WorkerId("prefill-0")].pool.held > POOL // 2
    pools.cluster.thaw("decode-0")
    pools.all_end()
