"""What is asked of a service, by tier and tenant, and what became of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from bench.load.statistics import Interval, wilson
from coordinator.targets import NO_TARGETS, Targets

Outcome = Literal["ok", "refused", "failed"]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """`at_s` from the start of the run."""

    index: int
    at_s: float
    tier: str
    tenant: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """`text_s`: when each token went out to the client, from the start of the run; `end_s`: its last word, or the
    refusal."""

    asked: Asked
    outcome: Outcome
    text_s: tuple[float, ...]
    end_s: float
    retry_after_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.text_s[0] - self.asked.at_s if self.text_s else None

    @property
    def worst_gap_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.text_s)), default=0.0)

    def gaps_within(self, itl_s: float) -> tuple[int, int]:
        """How many of its gaps are, and how many there are."""
        gaps_s = [b - a for a, b in itertools.pairwise(self.text_s)]
        return sum(gap_s <= itl_s for gap_s in gaps_s), len(gaps_s)

    def in_time(self, targets: Targets) -> bool:
        """Its first token was."""
        return self.ttft_s is not None and (targets.ttft_s is None or self.ttft_s <= targets.ttft_s)

    def meets(self, targets: Targets) -> bool:
        """First token and every gap were in time, and it came to its end."""
        kept = targets.itl_s is None or self.worst_gap_s <= targets.itl_s
        return self.outcome == "ok" and self.in_time(targets) and kept


@dataclass(frozen=True, slots=True)
class Judged:
    """Of one tier. Shares with 95 % intervals: first tokens and gaps of those taken in that were in time, and requests
    all of which was."""

    asked: int
    refused: int
    failed: int
    first_tokens: Interval
    gaps: Interval
    whole: Interval
    tokens: int


def judged(told: Iterable[Told], tier: str, targets: Targets = NO_TARGETS) -> Judged:
    of = [one for one in told if one.asked.tier == tier]
    taken = [one for one in of if one.outcome != "refused"]
    gaps = [one.gaps_within(targets.itl_s or float("inf")) for one in taken]
    return Judged(
        len(of),
        len(of) - len(taken),
        sum(one.outcome == "failed" for one in taken),
        wilson(sum(one.in_time(targets) for one in taken), len(taken)),
        wilson(sum(kept for kept, _ in gaps), sum(count for _, count in gaps)),
        wilson(sum(one.meets(targets) for one in taken), len(taken)),
        sum(len(one.text_s) for one in taken),
    )


def poisson(
    seed: int,
    rate: float,
    until_s: float,
    *,
    tier: str,
    tenant: str,
    prompt: Span,
    output: Span,
    from_s: float = 0.0,
) -> list[Asked]:
    """Arrivals of one tenant, lengths drawn evenly; numbered from 0."""
    random = Random(seed)
    asked: list[Asked] = []
    at_s = from_s + random.expovariate(rate)
    while at_s < until_s:
        asked.append(Asked(len(asked), at_s, tier, tenant, random.randint(*prompt), random.randint(*output)))
        at_s += random.expovariate(rate)
    return asked


def together(*parts: Sequence[Asked]) -> list[Asked]:
    """In the order of their times, numbered anew."""
    ordered = sorted(itertools.chain(*parts), key=lambda one: one.at_s)
    return [
        Asked(index, one.at_s, one.tier, one.tenant, one.prompt_tokens, one.output_tokens)
        for index, one in enumerate(ordered)
    ]
