"""The prefill worker's "handed over" and the decode worker's "started" travel apart: either may come first."""

from __future__ import annotations

import itertools

import pytest

from bench.virtual_cluster import FRONT
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.front_messages import Progress, Submit
from common.messages import Ended, Message, Started
from common.request import Request, RequestId, SamplingParams, first_attempt_of_epoch, pack_ids
from coordinator.cluster import Cluster
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry

ORDERS = list(itertools.permutations(("handed over", "started", "first token")))


@pytest.mark.parametrize("order", ORDERS, ids=[", ".join(order) for order in ORDERS])
def test_it_is_handed_over_whoever_says_so_first(order: tuple[str, ...]) -> None:
    cluster = Cluster(
        Registry(tokenizer_hash=None, fronts={FRONT: "virtual://front"}),
        WaitingQueue(max_requests=10, max_tokens=1000),
        first_attempt=first_attempt_of_epoch(1),
    )
    prefill, decode = (VirtualWorker(role, role, Shape(), StepTime()) for role in ("prefill", "decode"))
    for worker in (prefill, decode):
        cluster.from_worker(worker.card(), worker.sender, 0.0)
    request = Request(RequestId("r"), pack_ids([1, 2, 3]), SamplingParams(8), FRONT)
    cluster.submit(Submit((request,)), 1.0)
    cluster.turn(1.0)
    tracked = cluster.tracker.get(request.request_id)
    assert tracked is not None and tracked.prefill == "prefill" and tracked.decode == "decode"
    cluster.from_worker(Started(*tracked.key, phase="prefilling"), prefill.sender, 2.0)
    for event in order:
        if event == "first token":
            progress: Message = Progress(((request.request_id, 0, (7,)),))
            cluster.from_front(progress, 3.0)
        elif event == "started":
            cluster.from_worker(Started(*tracked.key, phase="decode_ready"), decode.sender, 3.0)
        else:
            cluster.from_worker(Ended(*tracked.key, "handed_over"), prefill.sender, 3.0)
    timeline = cluster.tracker.timeline(request.request_id, 5.0)
    assert timeline is not None and timeline["phase"] == "decode_ready"
    assert timeline["coordinator_seconds"]["decode_ready"] == 2.0
    cluster.from_front(Progress(((request.request_id, 1, (8,)),)), 6.0)
    timeline = cluster.tracker.timeline(request.request_id, 6.5)
    assert timeline is not None and timeline["phase"] == "decoding"
    assert timeline["coordinator_seconds"]["decode_ready"] == 3.0
