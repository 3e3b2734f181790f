"""Workers drained and started again, one at a time, under load and in virtual time: no request fails, all are exact."""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual_cluster import FRONT, Faults, Shape, VirtualCluster, VirtualWorker
from bench.virtual_model import VOCABULARY, continuation
from common.messages import Drain, Message
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids, unpack_ids

HEARD_AFTER_S = 0.05
STARTS_IN_S = 1.0


class DrainingCluster(VirtualCluster):
    """Its workers do with a Drain what a `WorkerLoop` does, and are started again when they have left."""

    left = 0

    def drain(self, name: str, deadline_s: float) -> None:
        effects = self.cluster.drain(WorkerId(name), deadline_s, self.now)
        assert effects is not None
        self._coordinator(effects)

    def _to_worker(self, name: WorkerId, message: Message) -> None:
        worker = self.workers[name]
        if not isinstance(message, Drain):
            super()._to_worker(name, message)
        elif worker.alive and not worker.node.draining:
            worker.node.draining = True
            life = worker.incarnation
            self.at(self.now + message.deadline_s, lambda: self._leave(worker, life))
            self._turn(worker)

    def _turn(self, worker: VirtualWorker) -> None:
        super()._turn(worker)
        if worker.alive and worker.node.draining and worker.node.idle and not worker.busy:
            self._leave(worker, worker.incarnation)

    def _leave(self, worker: VirtualWorker, life: int) -> None:
        if not worker.alive or worker.incarnation != life:
            return
        for key in worker.node.live_keys():
            self._carry_out(worker, worker.node.abort(key, "the worker shuts down", self.now))
        self._carry_out(worker, worker.node.turn(self.now))
        self._from_worker(worker, worker.node.heartbeat(0.0))
        worker.alive = False
        self.left += 1
        gone = worker.incarnation
        self.at(
            self.now + HEARD_AFTER_S,
            lambda: self._coordinator(self.cluster.worker_died(worker.name, gone, self.now)),
        )
        self.at(self.now + STARTS_IN_S, lambda: self.restart(worker.name))


@pytest.mark.parametrize("lose", [0.0, 0.05])
@pytest.mark.parametrize("deadline_s", [10.0, 0.0])
def test_all_workers_are_restarted_in_turn(deadline_s: float, lose: float) -> None:
    """With a long deadline what runs ends where it is; with a short one it goes on elsewhere. A lost Drain is said
    again."""
    cluster = DrainingCluster(
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
