"""What a worker remembers of requests so that late and doubled messages come to nothing. Pure.

Two bounded memories: the highest attempt seen of each request id (older ones are fenced), and how recently ended
ones ended (a repeated command is answered with that again instead of being run again).
"""

from __future__ import annotations

from common.messages import Ended
from common.request import Attempt, Key, RequestId


class Ledger:
    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._highest: dict[RequestId, Attempt] = {}
        self._ended: dict[Key, Ended] = {}

    def saw(self, key: Key) -> None:
        """Attempt `key` of the request has been dispatched: fences all below."""
        request_id, attempt = key
        highest = max(attempt, self._highest.pop(request_id, attempt))
        self._highest[request_id] = highest
        if len(self._highest) > self._limit:
            del self._highest[next(iter(self._highest))]

    def is_stale(self, key: Key) -> bool:
        request_id, attempt = key
        return attempt < self._highest.get(request_id, attempt)

    def end(self, ended: Ended) -> None:
        self._ended[ended.key] = ended
        if len(self._ended) > self._limit:
            del self._ended[next(iter(self._ended))]

    def how_ended(self, key: Key) -> Ended | None:
        return self._ended.get(key)
