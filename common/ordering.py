"""Who is next: the scheduling policies, small objects that place what waits. Pure.

A policy says of a request in which lane it stands and at which place of it; nothing else in the project asks which
policy there is. Lanes are served by class, lower first; lanes of one class by their virtual token counter
(`shares.py`), the least first; inside a lane the least place is first.

    fcfs      one lane                      by arrival
    priority  a lane for each class         by arrival
    fair      a lane for each class, tier   by deadline, then arrival      the default
              and tenant
    edf       a lane for each class         by deadline, then arrival

Why a tier has lanes of its own: its weight is a share "between tenants and tiers of one class", and where no keys are
set all tiers have the same tenant. A tenant that uses two tiers has two lanes, each with its tier's share.

Ageing, in the queue and on both nodes: whoever was not served for AGEING_S takes the next aged turn, the one that has
waited longest first, and there is one such turn in AGEING_S. So

- whoever waits with k others that have waited longer has its turn within (k + 2) x (AGEING_S + the time from one turn
  to the next), whatever class it is of and whatever its tenant has used, as long as its turn finds room for it;
- a higher class is delayed by aged ones by one chunk in AGEING_S at most: on a worker a turn is one chunk.

Both bounds at once: moving all of a class up after a while would keep the first and break the second, since a thousand
that came together age together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from common.request import Request

AGEING_S = 5.0

PolicyName = Literal["fcfs", "priority", "fair", "edf"]
Lane = tuple[int, str, str]
"""Class, tier, tenant: empty where the policy makes no difference."""
Place = tuple[float, int]
"""When the first token is due (the policy's reading of it), arrival: no two are equal."""


class Policy(Protocol):
    def lane(self, request: Request) -> Lane: ...
    def place(self, due: float, arrival: int) -> Place: ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    def lane(self, request: Request) -> Lane:
        return (0, "", "")

    def place(self, due: float, arrival: int) -> Place:
        return (0.0, arrival)


@dataclass(frozen=True, slots=True)
class Priority:
    def lane(self, request: Request) -> Lane:
        return (request.priority, "", "")

    def place(self, due: float, arrival: int) -> Place:
        return (0.0, arrival)


@dataclass(frozen=True, slots=True)
class Fair:
    def lane(self, request: Request) -> Lane:
        return (request.priority, request.tier, request.tenant)

    def place(self, due: float, arrival: int) -> Place:
        return (due, arrival)


@dataclass(frozen=True, slots=True)
class Edf:
    def lane(self, request: Request) -> Lane:
        return (request.priority, "", "")

    def place(self, due: float, arrival: int) -> Place:
        return (due, arrival)


POLICIES: dict[PolicyName, Policy] = {"fcfs": Fcfs(), "priority": Priority(), "fair": Fair(), "edf": Edf()}


def name_of(policy: Policy) -> str:
    return next((name for name, one in POLICIES.items() if one == policy), type(policy).__name__)


def due_at(request: Request, now: float) -> float:
    """When its first token is due; never, where nobody said."""
    return float("inf") if request.deadline_s is None else now + request.deadline_s
