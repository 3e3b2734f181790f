"""What each worker has been given and what that takes of it; which ones have room for more. Pure.

A prefill worker is given about two steps of prompt tokens ahead and no more, so that order, aborts and deaths cost
little. Ahead of a prompt is what goes before it there: nothing of a lower class, and none that is more than LONGER
times as long, since on the worker such a one leaves half of each step to it (`common/step_budget.py`). So neither keeps
it waiting here. A decode worker is given as many requests as its batch holds and as many blocks as they need now, plus
one each to grow into. One that starts whole batches is given a whole one ahead. What is in flight is counted here by
dispatch and end, not by heartbeats, which lag: nobody is sent to a worker for being idle half a second ago, so load
does not swing between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.request import RequestId, WorkerId
from common.step_budget import LONGER
from coordinator.registry import Worker

STEPS_AHEAD = 2
UNTRIED_S = 30.0
MOST_KNOWN = 1024
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Share:
    """What one request takes of its workers. `tokens` of its prompt are to be computed, which takes `seconds` (0 where
    nobody can say); `context` tokens stand before its row in a decode step; `itl_s` is what it was promised."""

    tokens: int
    blocks: int
    seconds: float = 0.0
    number: int = 0  # its class
    context: int = 0
    itl_s: float | None = None
    due: float = float("inf")  # when its first token is


class Prompts:
    """Given to one worker and not computed yet, in the order in which they were given."""

    __slots__ = ("_by_request", "_since", "tokens")

    def __init__(self) -> None:
        self._by_request: dict[RequestId, Share] = {}
        self._since = 0.0  # when the first of them came to be first
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._by_request)

    @property
    def per_s(self) -> float:
        """How many it computes in a second, by those that it has; 0 where it has none, or nobody can say."""
        seconds = sum(share.seconds for share in self._by_request.values())
        return len(self._by_request) / seconds if seconds else 0.0

    def put(self, request_id: RequestId, share: Share, now: float) -> None:
        self.drop(request_id)
        if not self._by_request:
            self._since = now
        self._by_request[request_id] = share
        self.tokens += share.tokens

    def computed(self, request_id: RequestId, now: float) -> None:
        if request_id in self._by_request:
            self._since = now
            self.drop(request_id)

    def drop(self, request_id: RequestId) -> None:
        share = self._by_request.pop(request_id, None)
        if share is not None:
            self.tokens -= share.tokens

    def has_room(self, tokens: int, number: int, step_tokens: int) -> bool:
        """For a prompt of class `number`."""
        ahead = sum(self._ahead(tokens, number))
        return ahead + min(tokens, step_tokens) <= STEPS_AHEAD * step_tokens

    def has_long(self, tokens: int, number: int, step_tokens: int) -> bool:
        """Whether such a prompt waits here for one that takes more than a step."""
        return any(other > step_tokens for other in self._ahead(tokens, number))

    def _ahead(self, tokens: int, number: int) -> list[int]:
        """Of a prompt of so many tokens: those of the prompts that go before it."""
        shares, most = self._by_request.values(), LONGER * tokens
        return [share.tokens for share in shares if share.number <= number and share.tokens <= most]

    def line(self, number: int, tokens: int, own_s: float, now: float) -> list[tuple[float, int]]:
        """Who goes before a prompt of that class and so many tokens, which takes `own_s`: seconds until each is
        computed, less what should be done of the first, and its tokens. One that is LONGER leaves half of each step
        to it, but for the time until it is due (`common/step_budget.py`): so it takes as long again as the prompt
        itself."""
        found: list[tuple[float, int]] = []
        at_s, done_s = 0.0, now - self._since
        for share in self._by_request.values():
            if share.number <= number:
                left_s = max(0.0, share.seconds - done_s)
                if share.tokens > LONGER * tokens:
                    alone_s = share.due - now if now < share.due < _NEVER else 0.0
                    left_s = min(left_s, alone_s + own_s)
                at_s += left_s
                found.append((at_s, share.tokens))
            done_s = 0.0
        return found

    def seconds_ahead(self, number: int, tokens: int, own_s: float, now: float) -> float:
        """Of work before such a prompt."""
        line = self.line(number, tokens, own_s, now) if self._by_request else None
        return line[-1][0] if line else 0.0


class Rows:
    """Given to one decode worker and not ended."""

    __slots__ = ("_by_request", "_itls_s", "blocks", "context")

    def __init__(self) -> None:
        self._by_request: dict[RequestId, Share] = {}
        self._itls_s: dict[float, int] = {}
        self.blocks = 0
        self.context = 0

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def tightest_itl_s(self) -> float | None:
        return min(self._itls_s, default=None)

    def put(self, request_id: RequestId, share: Share) -> None:
        self.drop(request_id)
        self._by_request[request_id] = share
        self.blocks += share.blocks
        self.context += share.context
        if share.itl_s is not None:
            self._itls_s[share.itl_s] = self._itls_s.get(share.itl_s, 0) + 1

    def drop(self, request_id: RequestId) -> None:
        share = self._by_request.pop(request_id, None)
        if share is None:
            return
        self.blocks -= share.blocks
        self.context -= share.context
        if share.itl_s is not None:
            self._itls_s[share.itl_s] -= 1
            if not self._itls_s[share.itl_s]:
                del self._itls_s[share.itl_s]


_NO_PROMPTS = Prompts()
_NO_ROWS = Rows()


class Router:
    """The account of every worker."""

    def __init__(self) -> None:
        self._prompts: dict[WorkerId, Prompts] = {}
        self._rows: dict[WorkerId, Rows] = {}
        self._given_at: dict[WorkerId, float] = {}  # its last prompt

    @property
    def empty(self) -> bool:
        """Nobody takes anything of any worker."""
        return not self._prompts and not self._rows

    def prompts(self, worker: WorkerId) -> Prompts:
        """To be read only."""
        return self._prompts.get(worker, _NO_PROMPTS)

    def rows(self, worker: WorkerId) -> Rows:
        """To be read only."""
        return self._rows.get(worker, _NO_ROWS)

    def tokens_ahead(self, worker: WorkerId) -> int:
        return self.prompts(worker).tokens

    def assign(
        self,
        request_id: RequestId,
        prefill: WorkerId | None,
        decode: WorkerId | None,
        share: Share,
        now: float,
    ) -> None:
        if prefill is not None:
            if len(self._given_at) >= MOST_KNOWN:
                self._given_at.clear()
            self._given_at[prefill] = now
            self._prompts.setdefault(prefill, Prompts()).put(request_id, share, now)
        if decode is not None:
            self._rows.setdefault(decode, Rows()).put(request_id, share)

    def computed(self, request_id: RequestId, worker: WorkerId | None, now: float) -> None:
        """Its prompt is: it is no longer ahead of anybody at `worker`."""
        if worker in self._prompts:
            self._prompts[worker].computed(request_id, now)
            if not self._prompts[worker]:
                del self._prompts[worker]

    def release(self, request_id: RequestId, prefill: WorkerId | None, decode: WorkerId | None) -> None:
        for worker, table in ((prefill, self._prompts), (decode, self._rows)):
            held = table.get(worker) if worker is not None else None
            if held is not None and worker is not None:
                held.drop(request_id)
                if not held:
                    del table[worker]

    def untried(self, worker: WorkerId, now: float) -> bool:
        """It has been given no prompt for long, so nobody knows how fast it is now."""
        return now - self._given_at.setdefault(worker, now) > UNTRIED_S and not self.prompts(worker)

    # ------------------------------------------------------------ room

    def may_prefill(self, worker: Worker, tokens: int, number: int) -> bool:
        if worker.card.whole_batches:  # what its batch holds is all that limits it
            return True
        prompts = self._prompts.get(worker.id)
        return prompts is None or prompts.has_room(tokens, number, worker.card.max_num_batched_tokens)

    def has_long(self, worker: Worker, tokens: int, number: int) -> bool:
        """Whether such a prompt waits there for one that takes more than a step."""
        prompts = self._prompts.get(worker.id)
        if prompts is None or worker.card.whole_batches:
            return False
        return prompts.has_long(tokens, number, worker.card.max_num_batched_tokens)

    def batch_share(self, worker: Worker) -> float:
        return len(self.rows(worker.id)) / worker.card.max_num_seqs


def least(
    workers: list[Worker], avoid: Collection[WorkerId], load: Callable[[Worker], float]
) -> Worker | None:
    """The least loaded; workers to avoid only when there is no other; ties by order of registration."""
    preferred = [w for w in workers if w.id not in avoid] or workers
    return min(preferred, key=load, default=None)
