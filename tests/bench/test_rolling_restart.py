"""Workers drained and started again, one at a time, under load and in virtual time: no request fails, all are exact."""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_model import VOCABULARY, continuation
from bench.virtual_network import Faults
from bench.virtual_worker import Shape, VirtualWorker
from common.request import Request, RequestId, SamplingParams, pack_ids, unpack_ids

STARTS_IN_S = 1.0


class RestartingCluster(VirtualCluster):
    """Its workers are started again when they have left."""

    left = 0

    def _process_left(self, worker: VirtualWorker) -> None:
        super()._process_left(worker)
        self.left += 1
        self.at(self.now + STARTS_IN_S, lambda: self.restart(worker.name))


@pytest.mark.parametrize("lose", [0.0, 0.05])
@pytest.mark.parametrize("deadline_s", [10.0, 0.0])
def test_all_workers_are_restarted_in_turn(deadline_s: float, lose: float) -> None:
    """With a long deadline what runs ends where it is; with a short one it goes on elsewhere. A lost Drain is said
    again."""
    cluster = RestartingCluster(
        seed=0,
        num_prefill=2,
        num_decode=2,
        prefill_shape=Shape(),
        decode_shape=Shape(),
        faults=Faults(lose=lose),
    )
    cluster.run(until=1.0)
    random = Random(0)
    requests: list[Request] = []

    def submit(request: Request) -> None:
        cluster.submit(request)

    for index in range(120):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 300))]
        request = Request(RequestId(f"r{index}"), pack_ids(prompt), SamplingParams(max_tokens=64), FRONT)
        requests.append(request)
        cluster.at(1.0 + index / 4, lambda r=request: submit(r))  # type: ignore[misc]
    for index, name in enumerate(("prefill-0", "decode-0", "prefill-1", "decode-1")):
        cluster.at(3.0 + 7 * index, lambda n=name: cluster.drain(n, deadline_s))  # type: ignore[misc]
    cluster.run(until=60.0)
    cluster.faults = Faults()
    cluster.run(until=70.0)
    for request in requests:
        answer = cluster.answers[request.request_id]
        assert (answer.end, answer.ids) == ("length", continuation(unpack_ids(request.prompt_ids), 64))
    cluster.check_idle()
    counters = cluster.cluster.counters
    assert cluster.left == 4 and counters.total("workers_lost_total") == 0
    moved = counters.total("requests_migrated_total")
    if not lose:  # with time, nothing moves but what was on its way to a worker as it began to drain
        assert moved <= 4 if deadline_s else moved > 0
