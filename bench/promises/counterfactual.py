"""Would those that were refused have met their targets? Each alone is put into a replay of what was taken in.

The replay is in virtual time and refuses nobody: those that were taken in come when they came. Where one that is looked
at was refused, the process forks; there it comes too, and time goes on to its end. (A replay that begins shortly before
it would not do: what is taken in keeps a full service full, but does not fill an empty one.)

What a replay says is worth as much as it agrees with what was: the first tokens of those taken in, with nobody put in,
are held against the real ones. A machine that is slower than the step times by which the replay goes is followed by
`calibrated`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from bench.promises.asked import Asked, Told
from bench.promises.virtual import Service, VirtualRun
from bench.virtual_worker import StepTime
from coordinator.targets import Targets

STEP_S = 0.1
ENDS_WITHIN_S = 60.0
HALVINGS = 7
MOST_SLOWER = 2.0
"""Or faster: beyond that the step times are of another machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of so many `sampled`, `met` would have met their targets. `off_s`: first tokens of those taken in, in the replays
    less what they were."""

    sampled: int
    met: int
    off_s: tuple[float, ...]

    @property
    def usually_off_s(self) -> float:
        return median(self.off_s) if self.off_s else 0.0

    @property
    def mostly_within_s(self) -> float:
        """Nine tenths of them are off by no more."""
        ordered = sorted(map(abs, self.off_s))
        return ordered[int(0.9 * (len(ordered) - 1))] if ordered else 0.0


def would_have_met(service: Service, told: Sequence[Told], sample: int, seed: int = 0) -> Verdict:
    """Of so many refused ones, drawn at random."""
    refused = [one for one in told if one.outcome == "refused"]
    taken = [one for one in told if one.outcome != "refused"]
    chosen = Random(seed).sample(refused, min(sample, len(refused)))
    virtual = VirtualRun(replace(service, refuse_late=False))
    virtual.ask([one.asked for one in taken])
    met = 0
    for one in sorted(chosen, key=lambda one: one.asked.at_s):
        virtual.cluster.run(until=virtual.start_s + one.asked.at_s)
        met += _in_a_fork(virtual, one.asked, service.targets[one.asked.tier])
    again = {
        one.asked.index: one.ttft_s for one in virtual.run(max((o.asked.at_s for o in taken), default=0.0))
    }
    pairs = [(again[one.asked.index], one.ttft_s) for one in taken]
    return Verdict(
        len(chosen), met, tuple(then - was for then, was in pairs if then is not None and was is not None)
    )


def calibrated(service: Service, told: Sequence[Told]) -> tuple[Service, float]:
    """With steps so much longer or shorter that first tokens of those taken in come when they came, in the middle; and
    how much. By halving: over capacity a little longer steps make all that wait much later, so a factor that follows
    from how late they are runs away."""
    taken = [one for one in told if one.outcome != "refused"]
    low, high = math.log(1 / MOST_SLOWER), math.log(MOST_SLOWER)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _too_soon(_slower(service, math.exp(middle)), taken) else (low, middle)
    factor = math.exp((low + high) / 2)
    return _slower(service, factor), factor


def _too_soon(service: Service, taken: Sequence[Told]) -> bool:
    virtual = VirtualRun(service)
    virtual.ask([one.asked for one in taken])
    again = virtual.run(max(one.asked.at_s for one in taken))
    pairs = [(one.ttft_s, was.ttft_s) for was, one in zip(taken, again, strict=True)]
    sooner = [then < was for then, was in pairs if then is not None and was is not None]
    return 2 * sum(sooner) > len(sooner)


def _slower(service: Service, factor: float) -> Service:
    return replace(
        service,
        prefill_steps=slower(service.prefill_steps, factor),
        decode_steps=slower(service.decode_steps, factor),
        refuse_late=False,
    )


def slower(step: StepTime, factor: float) -> StepTime:
    return StepTime(factor * step.base_s, factor * step.row_s, factor * step.token_s, factor * step.context_s)


def _in_a_fork(virtual: VirtualRun, asked: Asked, targets: Targets) -> bool:
    """What would come of it from here on, and nothing of that comes back but the answer."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, b"y" if _meets(virtual, asked, targets) else b"n")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    assert said in (b"y", b"n"), "a replay broke off"
    return said == b"y"


def _meets(virtual: VirtualRun, asked: Asked, targets: Targets) -> bool:
    cluster = virtual.cluster
    virtual.ask([asked])
    until_s = cluster.now + ENDS_WITHIN_S
    while cluster.now <= until_s:
        cluster.run(until=cluster.now + STEP_S)
        answer = virtual.answer(asked.index)
        if answer is not None:
            late = not answer.stamps and cluster.now - answer.submitted > (targets.ttft_s or ENDS_WITHIN_S)
            if late or answer.end is not None:
                break
    (one,) = [one for one in virtual.told() if one.asked.index == asked.index]
    return one.meets(targets)
