"""A load in virtual time: the production objects, with tiers and targets, at the speed of some machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from bench.promises.asked import Asked, Told
from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_model import VOCABULARY
from bench.virtual_worker import Shape, StepTime
from common.config import Tier
from common.request import Request, RequestId, SamplingParams, pack_ids
from coordinator.first_token import FirstTokenPacing
from coordinator.targets import Targets, targets_of

PREFILL_STEPS = StepTime(base_s=0.017, row_s=0.0002, token_s=0.0003)
DECODE_STEPS = StepTime(base_s=0.018, row_s=0.0008, token_s=0.0003)
"""One core of a machine of ours, for the default model."""
WARM_UP = 24
QUIET_S = 1.0
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Service:
    """`refuse_late`, `local_prefill`: see `Cluster`."""

    prefill: int = 1
    decode: int = 1
    prefill_steps: StepTime = PREFILL_STEPS
    decode_steps: StepTime = DECODE_STEPS
    shape: Shape = field(default_factory=lambda: Shape(num_blocks=1400, max_num_seqs=16))
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    local_prefill: bool = True
    refuse_late: bool = True

    @property
    def targets(self) -> dict[str, Targets]:
        return {name: targets_of(tier) for name, tier in self.tiers.items()}


class VirtualRun:
    """Warmed up when made, so that step times are known."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.cluster = VirtualCluster(
            seed=0,
            num_prefill=service.prefill,
            num_decode=service.decode,
            prefill_shape=service.shape,
            decode_shape=service.shape,
            step_time=service.prefill_steps,
            decode_step_time=service.decode_steps,
            targets=service.targets,
            local_prefill=service.local_prefill,
            refuse_late=service.refuse_late,
        )
        self.cluster.run(until=1.0)
        self._warm_up()
        self.start_s = self.cluster.now
        self._answers: list[tuple[Asked, Answer]] = []

    def _warm_up(self) -> None:
        random = Random("warm up")
        for number in range(WARM_UP * max(1, self._service.prefill, self._service.decode)):
            length = random.choice((40, 250, 600))
            prompt = pack_ids(random.randrange(VOCABULARY) for _ in range(length))
            sampling = SamplingParams(random.randint(4, 24))
            self.cluster.submit(Request(RequestId(f"warm-{number}"), prompt, sampling, FRONT))
            self.cluster.run(until=self.cluster.now + 0.1)
        self._until_over()

    def ask(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            self.cluster.at(self.start_s + one.at_s, partial(self._submit, one))

    def _submit(self, one: Asked) -> None:
        random = Random(one.index)
        prompt = pack_ids(random.randrange(VOCABULARY) for _ in range(one.prompt_tokens))
        tier = self._service.tiers.get(one.tier, Tier())
        targets = targets_of(tier)
        request = Request(
            RequestId(f"r{one.index}"),
            prompt,
            SamplingParams(one.output_tokens),
            FRONT,
            priority=tier.priority,
            tier=one.tier,
            tenant=one.tenant,
            weight=tier.weight,
            deadline_s=targets.ttft_s,
            itl_s=targets.itl_s,
            ttft_s=targets.ttft_s,
        )
        self._answers.append((one, self.cluster.submit(request)))

    def run(self, until_s: float) -> list[Told]:
        """To the end of all that was asked by then."""
        self.cluster.run(until=self.start_s + until_s)
        self._until_over()
        return self.told()

    def answer(self, index: int) -> Answer | None:
        return self.cluster.answers.get(RequestId(f"r{index}"))

    def _until_over(self) -> None:
        limit_s = self.cluster.now + LIMIT_S
        while len(self.cluster.front):
            assert self.cluster.now < limit_s, "something never ends"
            self.cluster.run(until=self.cluster.now + 0.5)
        self.cluster.run(until=self.cluster.now + QUIET_S)

    def told(self) -> list[Told]:
        """As a client would see it: a first token is held back as the front does."""
        shown_s = self._first_shown_s()
        told = []
        for one, answer in self._answers:
            refused = answer.end == "NotAdmitted"
            outcome = "refused" if refused else "ok" if answer.end in ("length", "stop") else "failed"
            stamps = answer.stamps
            text_s = (shown_s[one.index], *stamps[1:]) if stamps else ()
            text_s = tuple(at_s - self.start_s for at_s in text_s)
            end_s = text_s[-1] if text_s else one.at_s
            told.append(Told(one, outcome, text_s, end_s, answer.retry_after_s))  # type: ignore[arg-type]
        return told

    def _first_shown_s(self) -> dict[int, float]:
        pacing = FirstTokenPacing(self._service.targets)
        events: list[tuple[float, int, Asked, Answer]] = []
        for one, answer in self._answers:
            events += [(at_s, place, one, answer) for place, at_s in enumerate(answer.stamps[:2])]
        shown_s = {}
        for at_s, place, one, answer in sorted(events, key=lambda event: (event[0], event[2].index)):
            if place:
                pacing.observed(at_s - answer.stamps[0])
                continue
            shown = at_s + pacing.hold_s(one.tier, at_s - answer.submitted)
            shown_s[one.index] = min([shown, *answer.stamps[1:2]])
        return shown_s


def run(service: Service, asked: Sequence[Asked], until_s: float) -> list[Told]:
    virtual = VirtualRun(service)
    virtual.ask(asked)
    return virtual.run(max(until_s, asked[-1].at_s))
