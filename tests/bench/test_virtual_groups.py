"""Several choices of one prompt in virtual time: who computes what, where they go, and what faults do to them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_model import VOCABULARY, continuation
from bench.virtual_network import Faults
from bench.virtual_worker import Shape
from common.request import Request, RequestId, SamplingParams, pack_ids, unpack_ids

ROUGH = Faults(lose=0.02, double=0.05, delay_s=(0.0001, 0.02), corrupt=0.01)
FAIR = Faults()
BLOCK = 16


def group(name: str, prompt: list[int], n: int, max_tokens: int = 20) -> list[Request]:
    """`n` choices of one prompt, as the front makes them."""
    main = Request(
        RequestId(name), pack_ids(prompt), SamplingParams(max_tokens), FRONT, leader=name if n > 1 else ""
    )
    return [main] + [
        replace(
            main, request_id=RequestId(f"{name}.{child}"), sampling=SamplingParams(max_tokens, child=child)
        )
        for child in range(1, n)
    ]


def check(cluster: VirtualCluster, requests: list[Request], ends: frozenset[str] = frozenset()) -> None:
    for request in requests:
        answer = cluster.answers[request.request_id]
        sampling = request.sampling
        wanted = continuation(unpack_ids(request.prompt_ids), sampling.max_tokens, sampling.child)
        assert answer.end in {"length", *ends}, (request.request_id, answer.end)
        assert answer.ids == wanted[: len(answer.ids)], f"{request.request_id} has a wrong token"
        if answer.end == "length":
            assert len(answer.ids) == len(wanted)


def counted(cluster: VirtualCluster, role: str, name: str) -> float:
    workers = [worker for worker in cluster.workers.values() if worker.role == role]
    return sum(worker.node.records.counters.total(name) for worker in workers)


def quiet(prefill: int, decode: int, shape: Shape, seed: int = 0) -> VirtualCluster:
    cluster = VirtualCluster(
        seed=seed,
        num_prefill=prefill,
        num_decode=decode,
        prefill_shape=shape,
        decode_shape=shape,
        faults=FAIR,
    )
    cluster.run(until=1.0)
    return cluster


def served(cluster: VirtualCluster, requests: list[Request]) -> list[Answer]:
    answers = cluster.submit_group(requests)
    while any(answer.end is None for answer in answers):
        assert cluster.now < 300.0, "hangs"
        cluster.run(until=cluster.now + 0.5)
    cluster.run(until=cluster.now + 5.0)
    cluster.check_idle()
    return answers


# ---------------------------------------------------------------- who computes the prompt


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [5, 15, 16, 17, 160, 165])
def test_the_prompt_is_computed_and_moved_once(length: int, caching: bool) -> None:
    """Two pairs of workers, and all choices on one: the followers find every whole block that hits may cover."""
    cluster = quiet(2, 2, Shape(prefix_caching=caching))
    n, last = 6, length - (length - 1) // BLOCK * BLOCK  # a hit leaves something to compute
    requests = group("g", list(range(1, length + 1)), n)
    served(cluster, requests)
    check(cluster, requests)
    assert counted(cluster, "prefill", "computed_tokens_total") == length + (n - 1) * last
    blocks = -(-length // BLOCK)
    moved = blocks + (n - 1) * (blocks - length // BLOCK)
    assert counted(cluster, "decode", "kv_transfer_bytes_total") == moved * 1000
    hits = (length - 1) // BLOCK * BLOCK
    assert counted(cluster, "prefill", "prefix_cache_hits_total") == (n - 1) * hits


@pytest.mark.parametrize("caching", [True, False])
def test_collocated_the_prompt_is_computed_once(caching: bool) -> None:
    cluster = quiet(0, 2, Shape(prefix_caching=caching))
    requests = group("g", list(range(1, 166)), 6)
    served(cluster, requests)
    check(cluster, requests)
    assert counted(cluster, "decode", "prefix_cache_hits_total") == 5 * 160


@pytest.mark.parametrize("caching", [True, False])
def test_only_a_family_shares_where_caching_is_off(caching: bool) -> None:
    cluster = quiet(1, 1, Shape(prefix_caching=caching))
    prompt = list(range(1, 166))
    served(cluster, group("g", prompt, 2))
    hits = counted(cluster, "prefill", "prefix_cache_hits_total")
    served(cluster, group("h", prompt, 1))
    served(cluster, group("i", prompt, 2))
    later = counted(cluster, "prefill", "prefix_cache_hits_total") - hits
    assert later == (160 * 3 if caching else 160)


def test_a_first_choice_that_ends_with_its_first_token() -> None:
    """It is never handed over: the others begin when it has ended."""
    cluster = quiet(1, 1, Shape())
    requests = group("g", list(range(1, 166)), 4, max_tokens=1)
    served(cluster, requests)
    check(cluster, requests)
    assert counted(cluster, "prefill", "computed_tokens_total") == 165 + 3 * 5


# ---------------------------------------------------------------- where they go


def test_more_choices_than_a_batch_holds_come_in_waves_and_spread() -> None:
    """BR-103. Affinity does not outrank room: with one pair full, the other one helps."""
    for workers in (1, 2):
        cluster = quiet(workers, workers, Shape(max_num_seqs=4))
        requests = group("g", list(range(1, 100)), 19, max_tokens=40)
        served(cluster, requests)
        check(cluster, requests)
        used = {cluster.cluster.timeline(r.request_id, cluster.now)["decode_worker"] for r in requests}  # type: ignore[index]
        assert len(used) == workers


def test_large_prompts_share_a_pool_that_holds_one_of_them() -> None:
    """40 blocks, 32 of them the prompt's: counted whole for each choice, they would come one by one."""
    cluster = quiet(1, 1, Shape(num_blocks=40, max_num_seqs=8))
    requests = group("g", list(range(1, 513)), 4, max_tokens=20)
    begun = cluster.now
    served(cluster, requests)
    check(cluster, requests)
    stamps = [cluster.answers[request.request_id].stamps for request in requests]
    assert max(times[0] for times in stamps[1:]) < min(times[-1] for times in stamps[1:]), "they ran together"
    assert counted(cluster, "decode", "num_preemptions_total") == 0 and begun < stamps[0][0]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_dead_pair_holds_up_nobody(victim: str) -> None:
    cluster = quiet(2, 2, Shape())
    requests = group("g", list(range(1, 200)), 5, max_tokens=60)
    answers = cluster.submit_group(requests)
    while not answers[0].ids:
        cluster.run(until=cluster.now + 0.01)
    timeline = cluster.cluster.timeline(RequestId("g"), cluster.now)
    assert timeline is not None
    cluster.kill(timeline[f"{victim}_worker"])
    while any(answer.end is None for answer in answers):
        assert cluster.now < 30.0, "hangs"
        cluster.run(until=cluster.now + 0.5)
    cluster.run(until=cluster.now + 8.0)
    check(cluster, requests)
    cluster.check_idle()


# ---------------------------------------------------------------- faults


class Run:
    """Random groups at random times over a rough network; some clients leave."""

    def __init__(self, seed: int, *, caching: bool, collocated: bool) -> None:
        self.random = random = Random(seed)
        shape = Shape(num_blocks=60, max_num_seqs=8, prefix_caching=caching)
        self.cluster = VirtualCluster(
            seed=seed,
            num_prefill=0 if collocated else 2,
            num_decode=2,
            prefill_shape=shape,
            decode_shape=shape,
            faults=ROUGH,
        )
        self.cluster.run(until=2.0)
        self.groups: list[list[Request]] = []
        at = 2.0
        for index in range(10):
            at += random.expovariate(3)
            prompt = [random.randrange(VOCABULARY) for _ in range(random.choice((1, 16, 40, 100, 300)))]
            requests = group(f"g{index}", prompt, random.choice((1, 2, 5, 12)), random.randint(1, 50))
            self.groups.append(requests)
            self.cluster.at(at, lambda r=requests: self._submit(r))  # type: ignore[misc]
            if random.random() < 0.25:
                leaver = random.choice(requests).request_id
                self.cluster.at(at + random.uniform(0, 3), lambda r=leaver: self.cluster.leave(r))  # type: ignore[misc]
        self.last_arrival = at

    def _submit(self, requests: list[Request]) -> None:
        self.cluster.submit_group(requests)

    def to_the_end(self) -> None:
        cluster = self.cluster
        while len(cluster.front) or cluster.now <= self.last_arrival:
            assert cluster.now < 400.0, f"hangs: {[r for r, a in cluster.answers.items() if not a.end]}"
            cluster.run(until=cluster.now + 1.0)
        cluster.faults = FAIR
        cluster.run(until=cluster.now + 5.0)
        for requests in self.groups:
            check(cluster, requests, frozenset({"left"}))
        cluster.check_idle()


@pytest.mark.parametrize("seed", range(12))
def test_every_choice_ends_once_exact_and_nothing_is_left(seed: int) -> None:
    Run(seed, caching=seed % 2 == 0, collocated=seed % 3 == 0).to_the_end()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_with_a_worker_that_dies_and_comes_back(victim: str, seed: int) -> None:
    run = Run(seed, caching=seed % 2 == 1, collocated=False)
    run.cluster.at(3.0, lambda: run.cluster.kill(victim))
    run.cluster.at(9.0, lambda: run.cluster.restart(victim))
    run.to_the_end()
