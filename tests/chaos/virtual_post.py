"""The post of a virtual cluster, as a test wants it: it lets everything pass but what it is told to meet. A policy of
`bench/virtual_network.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.virtual_network import Fate, Parcel, Policy
from common.messages import AboutRequest, Heartbeat, Tokens
from common.request import RequestId

Match = Callable[[Parcel], bool]


@dataclass(slots=True)
class Order:
    """Parcels that match get `change(fate)`; `times`: how many, None without end."""

    match: Match
    change: Callable[[Fate], Fate]
    times: int | None = 1
    met: int = 0


class Post:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.orders: list[Order] = []

    def meet(self, match: Match, change: Callable[[Fate], Fate], times: int | None = 1) -> Order:
        order = Order(match, change, times)
        self.orders.append(order)
        return order

    def __call__(self, parcel: Parcel) -> Fate:
        fate = self._policy(parcel)
        for order in self.orders:
            if (order.times is None or order.met < order.times) and order.match(parcel):
                order.met += 1
                return order.change(fate)
        return fate


def is_about(parcel: Parcel, request_id: RequestId) -> bool:
    match parcel.message:
        case AboutRequest():
            return parcel.message.id == request_id
        case Tokens():
            return any(row.id == request_id for row in parcel.message.rows)
        case Heartbeat():
            return any(live[0] == request_id for live in parcel.message.live)
    return False


def has_end(parcel: Parcel, request_id: RequestId) -> bool:
    """It holds the request's last token, or the word that a worker is done with it."""
    if isinstance(parcel.message, Tokens):
        return any(row.id == request_id and row.finish is not None for row in parcel.message.rows)
    return is_about(parcel, request_id)
