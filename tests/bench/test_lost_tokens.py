"""Tokens computed for nothing are counted, each once: in virtual time, against what the workers' models computed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_model import VOCABULARY
from bench.virtual_network import Faults
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.batching import Batch, RowResult
from common.counters import Counters, split_label
from common.messages import Role
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids

SMALL = Shape(num_blocks=24, max_num_seqs=8, prefix_caching=False)
LARGE = Shape(prefix_caching=False)
TIERS = ("chat", "batch")


class CountingWorker(VirtualWorker):
    """Counts the tokens of every row that somebody still waits for when its step is back, by tier."""

    def __init__(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> None:
        super().__init__(name, role, shape, step_time)
        self.computed: Counter[str] = Counter()

    def compute(self, batch: Batch) -> list[RowResult]:
        rows = zip(batch.rows, batch.counts, strict=True)
        for seq, count in rows:
            self.computed[seq.request.tier] += 0 if seq.over else count
        return list(super().compute(batch))


class CountingCluster(VirtualCluster):
    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> CountingWorker:
        return CountingWorker(name, role, shape, step_time)

    def computed(self, tier: str) -> int:
        return sum(w.computed[tier] for w in self.workers.values() if isinstance(w, CountingWorker))

    def lost_tokens(self, cause: str) -> float:
        return self.counted(f'lost_tokens_total{{cause="{cause}"}}')

    def counted(self, name: str) -> float:
        return sum(one.values.get(name, 0.0) for one in self._all_counters())

    def _all_counters(self) -> list[Counters]:
        return [self.cluster.counters, *(w.node.records.counters for w in self.workers.values())]

    def of_tiers(self, name: str) -> Counter[str]:
        """A counter that has a tier, over its other labels and all processes."""
        found: Counter[str] = Counter()
        for one in self._all_counters():
            for key, value in one.values.items():
                family, labels = split_label(key)
                if family == name:
                    found[labels["tier"]] += int(value)
        return found

    def give_all_back(self, name: str) -> None:
        """What a worker does that shuts down before its requests have ended."""
        loop = self.loops[WorkerId(name)]
        loop.give_back("shuts down")
        loop.turn()


def cluster_of(shape: Shape, seed: int = 0, prefill: int = 2) -> CountingCluster:
    cluster = CountingCluster(
        seed=seed, num_prefill=prefill, num_decode=2, prefill_shape=shape, decode_shape=shape, faults=Faults()
    )
    cluster.run(until=1.0)
    return cluster


def ask(cluster: CountingCluster, name: str, tokens: int, max_tokens: int, tier: str = "default") -> Request:
    random = Random(name)
    prompt = pack_ids([random.randrange(VOCABULARY) for _ in range(tokens)])
    request = Request(RequestId(name), prompt, SamplingParams(max_tokens=max_tokens), FRONT, tier=tier)
    cluster.submit(request)
    return request


def crowd(seed: int, shape: Shape, prefill: int) -> dict[str, float]:
    """Clients that leave, workers that give all back, batches that run out of blocks; what was lost, by cause. All
    that was computed is in some answer, or lost."""
    cluster = cluster_of(shape, seed, prefill)
    random = Random(seed)
    requests: list[Request] = []
    for index in range(40):
        tokens, out = random.randint(1, 150), random.randint(1, 200)
        at = 1.0 + index / 20
        asked = partial(ask, cluster, f"r{index}", tokens, out, TIERS[index % 2])
        cluster.at(at, lambda asked=asked: requests.append(asked()))  # type: ignore[misc]
        if random.random() < 0.3:
            cluster.at(at + random.uniform(0.01, 3), lambda i=index: cluster.leave(RequestId(f"r{i}")))  # type: ignore[misc]
    cluster.at(2.2, lambda: cluster.give_all_back("decode-0"))
    if prefill:
        cluster.at(2.5, lambda: cluster.give_all_back("prefill-0"))
    cluster.run(until=100.0)
    cluster.check_idle()
    useful: Counter[str] = Counter()
    for request in requests:
        answer = cluster.answers[request.request_id]
        assert answer.end in ("length", "left")
        if answer.end == "length":
            useful[request.tier] += request.prompt_tokens + len(answer.ids) - 1
    by_tier = cluster.of_tiers("tier_lost_tokens_total")
    for tier in TIERS:
        assert cluster.computed(tier) == useful[tier] + by_tier[tier], by_tier
    lost = {cause: cluster.lost_tokens(cause) for cause in ("preemption", "abort", "migration")}
    assert sum(lost.values()) == by_tier.total()
    victims, put_out = cluster.of_tiers("tier_preemptions_total"), cluster.counted("num_preemptions_total")
    assert victims.total() == put_out and (put_out > 0) == (lost["preemption"] > 0)
    return lost


@pytest.mark.parametrize("prefill", [2, 0])
@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_every_token_is_of_use_or_counted_as_lost_once(shape: Shape, prefill: int) -> None:
    """Without a prefix cache a token is computed once for every time that it is needed."""
    runs = [crowd(seed, shape, prefill) for seed in range(6)]
    total = {cause: sum(lost[cause] for lost in runs) for cause in runs[0]}
    assert total["abort"] > 0 and total["migration"] > 0
    assert (total["preemption"] > 0) == (shape is SMALL)


def test_a_dead_workers_share_is_what_the_front_had_of_it() -> None:
    cluster = cluster_of(LARGE, prefill=1)
    ask(cluster, "r", 50, 100)
    answer = cluster.answers[RequestId("r")]
    while len(answer.ids) < 10:
        cluster.run(until=cluster.now + 0.001)
    timeline = cluster.cluster.timeline(RequestId("r"), cluster.now)
    assert timeline is not None
    cluster.kill(timeline["decode_worker"])
    cluster.run(until=cluster.now + 20.0)
    assert answer.end == "length"
    assert cluster.lost_tokens("migration") in range(50 + 9, 50 + 12), "what was on its way to the front"
    assert cluster.lost_tokens("abort") == cluster.lost_tokens("preemption") == 0
