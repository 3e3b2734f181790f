"""The whole cluster in virtual time: every request ends once with exact tokens, and nothing is left of anything."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_model import VOCABULARY, continuation, prompt_scores
from bench.virtual_network import Faults
from bench.virtual_worker import Shape
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids, unpack_ids

FAIR = Faults()
ROUGH = Faults(lose=0.02, double=0.05, delay_s=(0.0001, 0.02), corrupt=0.01)
SMALL = Shape(num_blocks=60, max_num_seqs=8)
REQUESTS = 40
LIMIT_S = 400.0
SETTLES_S = 5.0  # far below the limits of both sides of a transfer: reconciliation clears, not a timeout


class Run:
    """Random arrivals, some clients that leave, and what each request should get."""

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = ROUGH,
        shape: Shape | None = None,
        prefill: int = 2,
        decode: int = 2,
        leavers: float = 0.2,
        requests: int = REQUESTS,
        out: tuple[int, int] = (1, 80),
        scored: bool = False,
    ) -> None:
        self.random = Random(seed + 1)
        self.scored = scored
        self.requests: list[Request] = []
        self.cluster = VirtualCluster(
            seed=seed,
            num_prefill=prefill,
            num_decode=decode,
            prefill_shape=shape,
            decode_shape=shape,
            faults=faults,
        )
        self.cluster.run(until=2.0)
        at = 2.0
        for index in range(requests):
            at += self.random.expovariate(20)
            request = self._request(index, out)
            self.cluster.at(at, lambda r=request: self._submit(r))  # type: ignore[misc]
            if self.random.random() < leavers:
                self.cluster.at(at + self.random.uniform(0, 3), lambda r=request: self._leave(r))  # type: ignore[misc]
        self.last_arrival = at

    def _request(self, index: int, out: tuple[int, int]) -> Request:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 400))]
        if self.random.random() < 0.4:  # a shared beginning, at times nothing else, so prefixes are hit
            prompt = [7] * 64 + prompt[: self.random.choice((0, 1, 15, 16, 200))]
        asks = 0 if self.scored and index % 3 else None
        sampling = SamplingParams(max_tokens=self.random.randint(*out), prompt_logprobs=asks)
        request = Request(RequestId(f"r{index}"), pack_ids(prompt), sampling, FRONT)
        self.requests.append(request)
        return request

    def _submit(self, request: Request) -> None:
        self.cluster.submit(request)

    def _leave(self, request: Request) -> None:
        if request.request_id in self.cluster.answers:
            self.cluster.leave(request.request_id)

    def to_the_end(self) -> VirtualCluster:
        cluster = self.cluster
        while len(cluster.front) or cluster.now <= self.last_arrival:
            assert cluster.now < LIMIT_S, f"hangs: {[r for r, a in cluster.answers.items() if not a.end]}"
            cluster.run(until=cluster.now + 1.0)
        cluster.faults = FAIR  # messages flow again: what is left must go by itself
        cluster.run(until=cluster.now + SETTLES_S)
        return cluster

    def check(self, *, may_end: frozenset[str] = frozenset()) -> None:
        cluster = self.cluster
        for request in self.requests:
            answer = cluster.answers[request.request_id]
            expected = continuation(unpack_ids(request.prompt_ids), request.sampling.max_tokens)
            assert answer.ids == expected[: len(answer.ids)], f"{request.request_id} has a wrong token"
            self._check_prompt(request)
            assert answer.end in {"length", "left", *may_end}, (request.request_id, answer.end)
            if answer.end == "length":
                assert len(answer.ids) == len(expected)
        cluster.check_idle()

    def _check_prompt(self, request: Request) -> None:
        """Each prompt token's log-probability once, in order, and all of them before the first token."""
        answer = self.cluster.answers[request.request_id]
        prompt = unpack_ids(request.prompt_ids)
        asked = request.sampling.prompt_logprobs is not None
        expected = list(prompt_scores(prompt, 1, len(prompt))) if asked else []
        got = answer.prompt_logprobs
        assert got == expected[: len(got)], f"{request.request_id} has a wrong prompt"
        assert not answer.ids or len(got) == len(expected), f"{request.request_id}: a token before its prompt"


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_exact_and_nothing_is_left(seed: int) -> None:
    run = Run(seed, shape=SMALL if seed % 2 else None)
    run.to_the_end()
    run.check()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("prefill", [0, 2])
def test_two_batches_out(prefill: int, seed: int) -> None:
    """Decode workers as they are on a device: the next step is decided while one runs."""
    shape = replace(SMALL if seed % 2 else Shape(), max_inflight=2)
    run = Run(seed, shape=shape, prefill=prefill)
    at_once = [0]
    run.cluster.at(2.5, lambda: _watch(run.cluster, at_once))
    run.to_the_end()
    run.check()
    assert at_once == [2]


def _watch(cluster: VirtualCluster, at_once: list[int]) -> None:
    at_once[0] = max(at_once[0], *(len(loop.batches) for loop in cluster.loops.values()))
    if cluster.now < 8.0:
        cluster.at(cluster.now + 0.01, lambda: _watch(cluster, at_once))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [None, SMALL])
def test_collocated(seed: int, shape: Shape | None) -> None:
    """No prefill pool: the decode workers serve alone."""
    run = Run(seed, shape=shape, prefill=0)
    run.to_the_end()
    run.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_timeout_s", [0.0, 0.05])
def test_request_level_batches(seed: int, batch_timeout_s: float) -> None:
    """Losses, clients that leave, and last batches that do not become full."""
    run = Run(seed, shape=Shape(max_num_seqs=8, batch_timeout_s=batch_timeout_s), prefill=0)
    run.to_the_end()
    run.check()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("prefill", [2, 0])
def test_log_probabilities_of_prompts_come_whole(prefill: int, seed: int) -> None:
    """Lost, doubled and late messages; prefix hits that may not be used; preemption while the prompt runs."""
    run = Run(seed, shape=SMALL if seed % 2 else None, prefill=prefill, scored=True)
    run.to_the_end()
    run.check()
    assert sum(len(answer.prompt_logprobs) for answer in run.cluster.answers.values()) > 1000


@pytest.mark.parametrize("prefill", [2, 0])
def test_log_probabilities_of_prompts_cost_no_second_attempt(prefill: int) -> None:
    """Where nothing is lost, nothing is missing: prompts with and without them share steps."""
    run = Run(1, faults=FAIR, prefill=prefill, leavers=0.0, scored=True)
    cluster = run.to_the_end()
    run.check()
    assert cluster.cluster.counters.values.get("requests_migrated_total", 0.0) == 0


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_of_prompts_survive_deaths(seed: int) -> None:
    run = Run(seed, faults=FAIR if seed % 2 else ROUGH, scored=True)
    run.cluster.at(2.6, lambda: run.cluster.kill("prefill-0"))
    run.cluster.at(3.2, lambda: run.cluster.kill("decode-0"))
    run.cluster.at(7.0, lambda: run.cluster.restart("prefill-0"))
    run.to_the_end()
    run.check(may_end=frozenset({"RequestFailed"}))
    assert [a.end for a in run.cluster.answers.values()].count("RequestFailed") <= 1


def scored_request(name: str, prompt: list[int], asks: int | None = 0, max_tokens: int = 5) -> Request:
    return Request(RequestId(name), pack_ids(prompt), SamplingParams(max_tokens, prompt_logprobs=asks), FRONT)


def test_prefill_worker_dies_in_the_middle_of_a_prompt() -> None:
    """What it has said stays, the next attempt says the whole prompt, and the client hears each token once."""
    cluster = VirtualCluster(
        seed=0, num_prefill=2, num_decode=1, prefill_shape=Shape(max_num_batched_tokens=32), faults=FAIR
    )
    cluster.run(until=1.0)
    prompt = list(range(300))
    answer = cluster.submit(scored_request("r", prompt))
    while len(answer.prompt_logprobs) < 100:
        cluster.run(until=cluster.now + 0.001)
    timeline = cluster.cluster.tracker.timeline(RequestId("r"), cluster.now)
    assert timeline is not None and len(answer.prompt_logprobs) < 200
    cluster.kill(timeline["prefill_worker"])
    cluster.run(until=cluster.now + 20.0)
    assert (answer.end, answer.ids) == ("length", continuation(prompt, 5))
    assert answer.prompt_logprobs == list(prompt_scores(prompt, 1, 300))
    timeline = cluster.cluster.tracker.timeline(RequestId("r"), cluster.now)
    assert timeline is not None and timeline["attempts"] == 2


@pytest.mark.parametrize("prefill", [1, 0])
def test_a_scored_prompt_is_computed_whole_and_fills_the_cache(prefill: int) -> None:
    cluster = VirtualCluster(seed=0, num_prefill=prefill, num_decode=1, faults=FAIR)
    cluster.run(until=1.0)
    node = cluster.workers[WorkerId("prefill-0" if prefill else "decode-0")].node
    prompt = list(range(160))

    def hits_of(name: str, asks: int | None) -> float:
        before = node.records.counters.values.get("prefix_cache_hits_total", 0.0)
        answer = cluster.submit(scored_request(name, prompt, asks))
        cluster.run(until=cluster.now + 5.0)
        wanted = 159 if asks is not None else 0
        assert answer.end == "length" and len(answer.prompt_logprobs) == wanted
        return node.records.counters.values["prefix_cache_hits_total"] - before

    assert [hits_of("cold", 0), hits_of("unscored", None), hits_of("scored", 0)] == [0, 144, 0]
    cluster.check_idle()


def test_same_seed_same_run() -> None:
    first, second = (Run(5, shape=SMALL).to_the_end() for _ in range(2))
    assert first.answers == second.answers
    assert first.cluster.counters.values == second.cluster.counters.values
    other = Run(6, shape=SMALL).to_the_end()
    assert [a.stamps for a in other.answers.values()] != [a.stamps for a in first.answers.values()]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_worker_dies_and_comes_back(victim: str, seed: int) -> None:
    run = Run(seed, faults=FAIR if seed % 2 else ROUGH)
    run.cluster.at(3.0, lambda: run.cluster.kill(victim))
    run.cluster.at(9.0, lambda: run.cluster.restart(victim))
    cluster = run.to_the_end()
    run.check()
    assert cluster.cluster.counters.values[f'workers_lost_total{{role="{victim.split("-")[0]}"}}'] >= 1


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_BR_040_worker_is_replaced_at_once_under_its_old_name(victim: str) -> None:
    """Nobody has noticed the death when the new incarnation registers."""
    run = Run(1, faults=FAIR, prefill=1, decode=1)
    run.cluster.at(3.0, lambda: run.cluster.restart(victim))
    run.to_the_end()
    run.check()


def test_worker_stops_answering_and_comes_back_as_if_nothing_was() -> None:
    """A worker that was away long enough to be given up is fenced: what it still says changes nothing."""
    run = Run(2, faults=FAIR)
    run.cluster.at(3.0, lambda: run.cluster.freeze("decode-0"))
    run.cluster.at(8.0, lambda: run.cluster.thaw("decode-0"))
    run.to_the_end()
    run.check()


def test_both_prefill_workers_die_and_the_decode_workers_serve_alone() -> None:
    run = Run(3, faults=FAIR)
    run.cluster.at(2.5, lambda: run.cluster.kill("prefill-0"))
    run.cluster.at(2.5, lambda: run.cluster.kill("prefill-1"))
    run.to_the_end()
    run.check(may_end=frozenset({"RequestFailed"}))
    ends = [answer.end for answer in run.cluster.answers.values()]
    assert ends.count("RequestFailed") == 0, "one death each is nobody's fault"


def test_coordinator_restarts_and_learns_the_cluster_from_its_workers() -> None:
    run = Run(4, faults=FAIR, leavers=0.0)
    run.cluster.at(3.0, run.cluster.restart_coordinator)
    cluster = run.to_the_end()
    run.check(may_end=frozenset({"coordinator lost", "NoWorker"}))
    ends = [answer.end for answer in cluster.answers.values()]
    assert ends.count("coordinator lost") >= 1, "nothing was running: the test is blunt"
    assert ends.count("length") >= 10
    late = [r for r, a in cluster.answers.items() if a.submitted > 5.0]
    assert all(cluster.answers[r].end == "length" for r in late), "new requests flow within seconds"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pools_that_fit_one_long_request_each(order: tuple[int, int]) -> None:
    """Two requests that each need nearly the whole of every pool, and short ones between: all end."""
    shape = Shape(num_blocks=40, max_num_seqs=4)
    cluster = VirtualCluster(
        seed=0, num_prefill=1, num_decode=1, prefill_shape=shape, decode_shape=shape, faults=FAIR
    )
    cluster.run(until=1.0)
    prompts = [[index + 1] * length for index, length in enumerate((560, 500))]
    prompts = [prompts[i] for i in order] + [[9] * 20, [8] * 300]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=640 - len(prompt))
        cluster.submit(Request(RequestId(f"r{index}"), pack_ids(prompt), sampling, FRONT))
    cluster.run(until=200.0)
    for index, prompt in enumerate(prompts):
        answer = cluster.answers[RequestId(f"r{index}")]
        assert (answer.end, answer.ids) == ("length", continuation(prompt, 640 - len(prompt)))
    cluster.check_idle()
