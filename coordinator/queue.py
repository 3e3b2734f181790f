"""The coordinator's queue: the only long queue in the system, bounded by requests and by prompt tokens. Pure.

Order: class (lower priority number first), then arrival. A request that goes back (next attempt) keeps its
arrival, so it stands before everything that came after it. One that waits for another's prompt is held: it counts,
but is not in line until it is let go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import islice

from common.request import RequestId


@dataclass(frozen=True, slots=True)
class Entry:
    id: RequestId
    priority: int
    arrival: int
    tokens: int
    since: float
    longest: int = 0  # prompt and answer together, if it comes to all that it may

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.arrival)


def _order(entry: Entry) -> tuple[int, int]:
    return entry.order


class WaitingQueue:
    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entries: list[Entry] = []
        self._by_id: dict[RequestId, Entry] = {}
        self._held: dict[RequestId, Entry] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def never_fits(self, requests: int, tokens: int) -> str | None:
        """Why so many requests at once, with so many prompt tokens in all, could not even wait here alone."""
        if requests > self._max_requests:
            limit = f"the {self._max_requests} requests that may wait here"
            return f"{requests} choices at once are more than {limit}; lower n or send fewer prompts"
        if requests > 1 and tokens > self._max_tokens:
            limit = f"the {self._max_tokens} that may wait here"
            return f"{tokens} prompt tokens at once are more than {limit}; send fewer prompts"
        return None

    def full_for(self, requests: int, tokens: int) -> str | None:
        """Why so many new requests, with so many prompt tokens in all, cannot wait here now, or None. One request
        always can wait alone."""
        waiting = len(self)
        if waiting + requests > self._max_requests:
            return f"{waiting} requests are waiting, the limit is {self._max_requests}"
        if waiting and self.tokens + tokens > self._max_tokens:
            return f"{self.tokens} prompt tokens are waiting, the limit is {self._max_tokens}"
        return None

    def push(self, entry: Entry) -> None:
        assert entry.id not in self._by_id and entry.id not in self._held
        insort(self._entries, entry, key=_order)
        self._by_id[entry.id] = entry
        self.tokens += entry.tokens

    def hold(self, entry: Entry) -> None:
        """Not in line yet: `let_go` puts it there."""
        assert entry.id not in self._by_id and entry.id not in self._held
        self._held[entry.id] = entry
        self.tokens += entry.tokens

    def let_go(self, request_id: RequestId) -> bool:
        """False if it is not held (any more)."""
        entry = self._held.pop(request_id, None)
        if entry is None:
            return False
        self.tokens -= entry.tokens
        self.push(entry)
        return True

    def ahead(self, count: int, room: int) -> list[Entry]:
        """The first `count` entries in line, in order, of those that somebody with `room` tokens in all could hold;
        a copy. The others wait for another worker, and are in nobody's way."""
        return list(islice((entry for entry in self._entries if entry.longest <= room), count))

    def first(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    def remove(self, request_id: RequestId) -> Entry | None:
        """Takes it out, in line or held."""
        entry = self._by_id.pop(request_id, None)
        if entry is not None:
            # Orders are unique (an arrival is), so the place is exact; most often it is the first.
            del self._entries[bisect_left(self._entries, entry.order, key=_order)]
        else:
            entry = self._held.pop(request_id, None)
        if entry is not None:
            self.tokens -= entry.tokens
        return entry

    def age_s(self, now: float) -> float:
        """How long the longest-waiting entry has stood here."""
        return max((now - entry.since for entry in (*self._entries, *self._held.values())), default=0.0)
