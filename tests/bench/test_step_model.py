"""What workers say of their step times, as the coordinator hears it: good enough to predict any step by."""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_worker import Shape, StepTime
from common.request import Request, RequestId, SamplingParams, pack_ids
from common.step_times import StepShape, seconds_of

TIME = StepTime(0.008, 0.0005, 0.0003)


def seconds(rows: int, chunk: int) -> float:
    """What `TIME` makes of a step: each row that is no chunk computes one token."""
    return TIME.base_s + TIME.row_s * rows + TIME.token_s * (chunk + rows - (chunk > 0))


@pytest.mark.parametrize(("prefill", "role"), [(1, "prefill"), (0, "decode")])
def test_heartbeats_say_how_long_a_step_takes(prefill: int, role: str) -> None:
    shape = Shape(num_blocks=2000)
    cluster = VirtualCluster(
        seed=1, num_prefill=prefill, num_decode=1, prefill_shape=shape, decode_shape=shape, step_time=TIME
    )
    cluster.run(until=2.0)
    assert all(worker.load.step_model == () for worker in cluster.cluster.registry.all()), "nothing ran yet"
    random = Random(2)
    for index in range(60):
        ids = pack_ids([random.randrange(1000) for _ in range(random.randint(20, 400))])
        cluster.submit(Request(RequestId(f"r{index}"), ids, SamplingParams(random.randint(1, 60)), FRONT))
        cluster.run(until=2.1 + 0.1 * index)
    cluster.run(until=9.0)
    (worker,) = (one for one in cluster.cluster.registry.all() if one.role == role)
    fitted = worker.load.step_model
    assert len(fitted) == 4
    for rows, chunk in ((1, 64), (2, 200), (1, 256)) if prefill else ((1, 0), (8, 0), (4, 64), (12, 240)):
        said = seconds_of(fitted, StepShape(rows, 200 * rows, chunk))
        assert said == pytest.approx(seconds(rows, chunk), rel=0.1), (rows, chunk)
