"""Would those that were refused have met their targets? Each alone is put into a replay of what was taken in. Pure.

The replay is in virtual time and refuses nobody: of those that were taken in, the ones of the BEFORE_S before it come
when they came, one refused one comes among them when it came, and the run ends with its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from bench.promises.asked import Told
from bench.promises.virtual import Service, VirtualRun

STEP_S = 0.1
BEFORE_S = 20.0
ENDS_WITHIN_S = 60.0


def would_have_met(service: Service, told: Sequence[Told], sample: int, seed: int = 0) -> tuple[int, int]:
    """How many of the refused ones that were sampled, and how many those were."""
    refused = [one for one in told if one.outcome == "refused"]
    taken = [one for one in told if one.outcome != "refused"]
    chosen = Random(seed).sample(refused, min(sample, len(refused)))
    return sum(_meets(service, taken, one) for one in chosen), len(chosen)


def _meets(service: Service, taken: Sequence[Told], refused: Told) -> bool:
    virtual = VirtualRun(replace(service, refuse_late=False))
    from_s = max(0.0, refused.asked.at_s - BEFORE_S)
    until_s = refused.asked.at_s + ENDS_WITHIN_S
    asked = [one.asked for one in (*taken, refused) if from_s <= one.asked.at_s < until_s]
    virtual.ask([replace(one, at_s=one.at_s - from_s) for one in asked])
    at_s, until_s = refused.asked.at_s - from_s, until_s - from_s
    targets = service.targets[refused.asked.tier]
    answer = None
    cluster = virtual.cluster
    cluster.run(until=virtual.start_s + at_s + STEP_S)
    while answer is None or answer.end is None:
        answer = virtual.answer(refused.asked.index)
        late = (
            answer is not None
            and not answer.stamps
            and cluster.now - answer.submitted > (targets.ttft_s or 1e9)
        )
        if late or cluster.now > virtual.start_s + until_s:
            return False
        cluster.run(until=cluster.now + STEP_S)
    (one,) = [one for one in virtual.told() if one.asked.index == refused.asked.index]
    return one.meets(targets)
