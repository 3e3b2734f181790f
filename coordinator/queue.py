"""The coordinator's queue: the only long queue in the system, bounded by requests, by prompt tokens and by tier. Pure.

Who is next, the policy says (`common/ordering.py`); `lanes.py` keeps that order. A request that goes back (next
attempt) keeps its arrival, so in its lane it stands before everything that came after it, and its lane is not charged
for it again. One that waits for another's prompt is held: it counts, but is not in line until it is let go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from itertools import islice

from common.ordering import AGEING_S, Fair, Lane, Place, Policy
from common.request import RequestId
from common.shares import Shares
from coordinator.lanes import Entry, Lanes, Rank

OLDEST_LOOKED_AT = 32
"""For the aged turn: of those that have waited longest, some may be too long for who is left."""


class WaitingQueue:
    """`tier_limits`: how many of a tier may wait, where that is limited."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        policy: Policy | None = None,
        tier_limits: Mapping[str, int] | None = None,
    ) -> None:
        self.policy = policy or Fair()
        self.shares = Shares()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tier_limits = dict(tier_limits or {})
        self._lanes = Lanes(self.shares)
        self._in_line: OrderedDict[RequestId, Entry] = OrderedDict()  # as they came here
        self._held: dict[RequestId, Entry] = {}
        self._of_tier: Counter[str] = Counter()
        self._aged_turn_at = float("-inf")
        self._has_aged_turn: Entry | None = None  # when the order was last asked for
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._in_line) + len(self._held)

    def waiting_of(self, tier: str) -> int:
        return self._of_tier[tier]

    # ------------------------------------------------------------ bounds

    def never_fits(self, requests: int, tokens: int, tier: str = "") -> str | None:
        """Why so many requests at once, with so many prompt tokens in all, could not even wait here alone."""
        of_tier = self._tier_limits.get(tier, self._max_requests)
        most = min(self._max_requests, of_tier)
        if requests > most:
            whose = "" if most == self._max_requests else f" in tier {tier} (its max_queue)"
            limit = f"the {most} requests that may wait here{whose}"
            return f"{requests} choices at once are more than {limit}; lower n or send fewer prompts"
        if requests > 1 and tokens > self._max_tokens:
            limit = f"the {self._max_tokens} that may wait here"
            return f"{tokens} prompt tokens at once are more than {limit}; send fewer prompts"
        return None

    def full_for(self, requests: int, tokens: int, tier: str = "") -> str | None:
        """Why so many new requests, with so many prompt tokens in all, cannot wait here now, or None. One request
        always can wait alone."""
        waiting = len(self)
        if waiting + requests > self._max_requests:
            return f"{waiting} requests are waiting and {requests} came, the limit is {self._max_requests}"
        of_tier, limit = self._of_tier[tier], self._tier_limits.get(tier)
        if limit is not None and of_tier + requests > limit:
            return f"{of_tier} requests of tier {tier} are waiting and {requests} came, its limit is {limit}"
        if waiting and self.tokens + tokens > self._max_tokens:
            return f"{self.tokens} prompt tokens are waiting, the limit is {self._max_tokens}"
        return None

    # ------------------------------------------------------------ in and out

    def push(self, entry: Entry) -> None:
        self._count(entry)
        self._stand_in_line(entry)

    def hold(self, entry: Entry) -> None:
        """Not in line yet: `let_go` puts it there."""
        self._count(entry)
        self._held[entry.id] = entry

    def let_go(self, request_id: RequestId) -> bool:
        """False if it is not held (any more)."""
        entry = self._held.pop(request_id, None)
        if entry is not None:
            self._stand_in_line(entry)
        return entry is not None

    def give_out(self, entry: Entry, now: float) -> None:
        """It is dispatched: taken out, and its lane charged for it."""
        if entry is self._has_aged_turn:
            self._has_aged_turn, self._aged_turn_at = None, now + AGEING_S
        self.shares.charge(entry.lane, entry.cost)
        self.remove(entry.id)

    def remove(self, request_id: RequestId) -> Entry | None:
        """Takes it out, in line or held."""
        entry = self._in_line.pop(request_id, None)
        if entry is not None:
            self._lanes.remove(entry)
        else:
            entry = self._held.pop(request_id, None)
        if entry is not None:
            self.tokens -= entry.tokens
            self._of_tier[entry.tier] -= 1
            if not self._of_tier[entry.tier]:
                del self._of_tier[entry.tier]
        return entry

    def _count(self, entry: Entry) -> None:
        assert entry.id not in self._in_line and entry.id not in self._held
        self.tokens += entry.tokens
        self._of_tier[entry.tier] += 1

    def _stand_in_line(self, entry: Entry) -> None:
        self._in_line[entry.id] = entry
        self._lanes.push(entry)

    # ------------------------------------------------------------ order

    @property
    def empty(self) -> bool:
        """Nobody stands in line."""
        return not self._in_line

    def in_order(self, wanted: Callable[[Entry], bool], now: float) -> Generator[tuple[Rank, Entry]]:
        """Those in line, in order, that are `wanted`; the others are in nobody's way. If the aged turn has come,
        whoever has it is the first. To be closed before anybody comes or goes: who is given out is so afterwards."""
        aged = self._has_aged_turn = self._aged(wanted, now)
        if aged is None:
            yield from self._lanes.in_order(wanted)
        else:
            yield (aged.lane[0], float("-inf"), aged.place), aged
            yield from self._lanes.in_order(lambda entry: entry is not aged and wanted(entry))

    def ahead_of(self, lane: Lane) -> tuple[float, float]:
        """Requests and prompt tokens that are served before one that comes to `lane` now, as things stand."""
        return self._lanes.before(lane)

    def around(self, lane: Lane, place: Place, most: int) -> tuple[list[Entry], list[Entry]]:
        """Who is served before one that comes there now, and who of its class behind it, both in order, no more than
        `most` together."""
        return self._lanes.around(lane, place, most)

    def rank(self, entry: Entry, within: int) -> Rank | None:
        """Where it stands, None where more than `within` of its lane stand before it."""
        return self._lanes.rank(entry, within)

    def _aged(self, wanted: Callable[[Entry], bool], now: float) -> Entry | None:
        if now < self._aged_turn_at:
            return None
        oldest = islice(self._in_line.values(), OLDEST_LOOKED_AT)
        return next((entry for entry in oldest if now - entry.since >= AGEING_S and wanted(entry)), None)

    def ages_s(self, now: float) -> dict[str, float]:
        """How long the one of each tier that came first has stood here."""
        found: dict[str, float] = {}
        for entry in (*self._held.values(), *self._in_line.values()):
            found[entry.tier] = max(now - entry.since, found.get(entry.tier, 0.0))
        return found

    def service_gap(self) -> float:
        """Between two lanes of one class that somebody waits in: how far their counters are apart at most."""
        return self._lanes.service_gap()

    def age_s(self, now: float) -> float:
        """How long the one that came first has stood here."""
        first = [*islice(self._in_line.values(), 1), *self._held.values()]
        return max((now - entry.since for entry in first), default=0.0)
