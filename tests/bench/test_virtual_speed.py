"""How fast the cluster in virtual time is. Run for itself: beside another process two hardware threads share a core."""

from __future__ import annotations

import gc
import time

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_worker import Shape
from common.request import Request, RequestId, SamplingParams, pack_ids

ENOUGH_PER_S = 40_000
"""Well under what it does (67,000 at best on an EPYC of Zen 3 at 2.4 GHz), so that only a fall to half of it is red."""


def test_tens_of_thousands_of_tokens_per_second() -> None:
    """Issue 2, point 7. Processor seconds of this process, the best of up to ten: neighbours slow it too. Without
    the garbage collector: what that costs depends on what else the test process holds."""
    shape = Shape(num_blocks=16_384, max_num_seqs=256, max_num_batched_tokens=2048)
    rates = []
    for _ in range(10):
        cluster = VirtualCluster(seed=1, num_prefill=2, num_decode=2, prefill_shape=shape, decode_shape=shape)
        cluster.run(until=1.0)
        for index in range(512):
            prompt = pack_ids([index] * (8 + index % 24))
            cluster.submit(Request(RequestId(f"r{index}"), prompt, SamplingParams(max_tokens=200), FRONT))
        gc.collect()
        gc.disable()
        began = time.process_time()
        try:
            while len(cluster.front):
                cluster.run(until=cluster.now + 1.0)
        finally:
            gc.enable()
        rates.append(cluster.tokens_out / (time.process_time() - began))
        assert cluster.tokens_out == 512 * 200
        if rates[-1] >= ENOUGH_PER_S:
            break
    print(f"{max(rates):,.0f} simulated tokens per second of one core")
    assert max(rates) >= ENOUGH_PER_S, rates
