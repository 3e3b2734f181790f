"""Counts tokens that were computed for nothing: thrown away by an abort, or by a migration. Pure.

Each once: both workers of an attempt may hold KV of the same tokens when it ends (the decode worker has all of it, the
prefill worker has not heard so yet), so what counts of an attempt is the most that one of them had. A worker that
died says nothing; of its share is known what the front has had of it. What a preemption throws away its worker counts.
"""

from __future__ import annotations

from typing import Literal

from common.counters import Counters, count_lost
from common.lifecycle import Phase, is_end
from common.messages import Ended
from common.request import Attempt, WorkerId
from coordinator.tracker import Tracked, Tracker

Cause = Literal["abort", "migration"]
ATTEMPTS_KEPT = 32


class LostTokens:
    def __init__(self, tracker: Tracker, counters: Counters) -> None:
        self._tracker = tracker
        self._counters = counters

    def ended(self, worker: WorkerId, message: Ended) -> None:
        """A worker's part is over. To be called before anything is made of it."""
        tracked = self._tracker.known(message.id)
        if tracked is None or not message.lost_tokens:
            return
        cause: Cause = "migration"
        if tracked.attempt == message.attempt:
            beaten = tracked.handed_over and worker != tracked.decode  # the decode worker has them
            if beaten or tracked.life.phase is Phase.FINISHED:
                return
            if is_end(tracked.life.phase) or not message.retryable:
                cause = "abort"
        self._add(tracked, message.attempt, message.lost_tokens, cause)

    def unheard(self, tracked: Tracked, cause: Cause) -> None:
        """Whoever holds the present attempt died, or is silent: all but the newest token that the front has had of it
        have KV there."""
        if tracked.prompt_done or tracked.handed_over:
            self._add(tracked, tracked.attempt, tracked.tokens - 1, cause)

    def _add(self, tracked: Tracked, attempt: Attempt, tokens: int, cause: Cause) -> None:
        counted = tracked.lost_tokens.pop(attempt, 0)
        tracked.lost_tokens[attempt] = max(counted, tokens)
        if len(tracked.lost_tokens) > ATTEMPTS_KEPT:
            del tracked.lost_tokens[next(iter(tracked.lost_tokens))]
        if tokens > counted:
            count_lost(self._counters, tokens - counted, cause=cause, tier=tracked.request.tier)
