"""A closed loop in virtual time, nobody promised anything: decode workers that take prompts may not cost throughput,
and gain some where prefill is what all wait for."""

from __future__ import annotations

from random import Random

import pytest

from bench.promises.virtual import Service, VirtualRun
from bench.virtual_cluster import FRONT, Answer
from bench.virtual_model import VOCABULARY
from bench.virtual_worker import Shape, StepTime
from common.request import Request, RequestId, SamplingParams, pack_ids

SHAPE = Shape(num_blocks=1400, max_num_seqs=64)
REQUESTS, AT_ONCE = 64, 16
EVEN = StepTime(base_s=0.018, row_s=0.0009, token_s=0.00035)
"""A machine with AMX: 256 prompt tokens take as long as 64 answer tokens in a batch of sixteen."""
PREFILL_BOUND = StepTime(base_s=0.010, row_s=0.0044, token_s=0.0035)
"""One with AVX2 alone: the prompt takes three times as long."""


def requests_per_s(step: StepTime, *, local_prefill: bool) -> float:
    service = Service(prefill_steps=step, decode_steps=step, shape=SHAPE, local_prefill=local_prefill)
    cluster, random = VirtualRun(service).cluster, Random(1)
    began, running, asked = cluster.now, list[Answer](), 0
    while running or asked < REQUESTS:
        while len(running) < AT_ONCE and asked < REQUESTS:
            prompt = pack_ids(random.randrange(VOCABULARY) for _ in range(256))
            running.append(cluster.submit(Request(RequestId(f"r{asked}"), prompt, SamplingParams(64), FRONT)))
            asked += 1
        cluster.run(until=cluster.now + 0.005)
        running = [answer for answer in running if answer.end is None]
    return REQUESTS / (cluster.now - began)


@pytest.mark.parametrize(("step", "gain"), [(EVEN, 0.97), (PREFILL_BOUND, 1.15)])
def test_local_prefill_gains_where_prefill_is_behind_and_costs_nothing_where_it_is_not(
    step: StepTime, gain: float
) -> None:
    without, with_it = (requests_per_s(step, local_prefill=local) for local in (False, True))
    assert with_it >= gain * without
