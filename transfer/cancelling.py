"""Cancellations said to a peer and not yet answered: said again, three times in all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.effects import Effect, ToReceiver
from common.messages import Cancel, PeerAddress
from common.request import Key, WorkerId

CANCEL_TRIES = 3


@dataclass(slots=True)
class _Cancelling:
    target: PeerAddress
    message: Cancel
    ask_at: float
    tries: int


class Cancellations:
    """One per transfer and peer: after a rebind the same request may be cancelled at two."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._open: dict[tuple[Key, WorkerId], _Cancelling] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, which: tuple[Key, WorkerId]) -> bool:
        return which in self._open

    def say(self, key: Key, target: PeerAddress, reason: str, now: float) -> Effect:
        message = Cancel(*key, reason)
        self._open[key, target.worker] = _Cancelling(target, message, now + self._retry_s, tries=1)
        return ToReceiver(target, message)

    def forget(self, key: Key, worker: WorkerId) -> None:
        """It is answered, or the transfer is offered there again."""
        self._open.pop((key, worker), None)

    def expire(self, now: float) -> list[Effect]:
        """Says again what is due. After the last try the receiver's own limit is the backstop."""
        effects: list[Effect] = []
        for which, cancelling in list(self._open.items()):
            if now < cancelling.ask_at:
                continue
            if cancelling.tries >= CANCEL_TRIES:
                del self._open[which]
                continue
            cancelling.tries += 1
            cancelling.ask_at = now + self._retry_s
            effects.append(ToReceiver(cancelling.target, cancelling.message))
        return effects

    def deadlines(self) -> list[float]:
        return [cancelling.ask_at for cancelling in self._open.values()]
