"""Which pair of workers gets a request: the least loaded of each pool that has room for it. Pure.

A prefill worker is given about two steps of prompt tokens ahead and no more, so that order, aborts and deaths cost
little. Ahead is what goes before: work of a lower class does not, so it keeps no higher one waiting here. A prompt
longer than a step counts as one step, since on the worker it leaves half of each to short ones, and is given only where
no other such prompt is ahead: so it keeps no short one waiting here either. A decode worker is given as many requests
as its batch holds and as many blocks as they need now, plus one each to grow into. One that starts whole batches is
given a whole one ahead. What is in flight is counted here by dispatch and end, not by heartbeats, which lag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.request import RequestId, WorkerId
from coordinator.registry import Worker

STEPS_AHEAD = 2


class _Shares:
    """Who takes how many blocks of one decode worker."""

    __slots__ = ("by_request", "total")

    def __init__(self) -> None:
        self.by_request: dict[RequestId, int] = {}
        self.total = 0

    def put(self, request_id: RequestId, amount: int) -> None:
        self.drop(request_id)
        self.by_request[request_id] = amount
        self.total += amount

    def drop(self, request_id: RequestId) -> None:
        self.total -= self.by_request.pop(request_id, 0)


_NOTHING = _Shares()


class _Prompts:
    """Who is to be computed at one worker: tokens and class of each."""

    __slots__ = ("by_request", "total")

    def __init__(self) -> None:
        self.by_request: dict[RequestId, tuple[int, int]] = {}
        self.total = 0

    def put(self, request_id: RequestId, tokens: int, number: int) -> None:
        self.drop(request_id)
        self.by_request[request_id] = (tokens, number)
        self.total += tokens

    def drop(self, request_id: RequestId) -> None:
        self.total -= self.by_request.pop(request_id, (0, 0))[0]

    def has_room(self, tokens: int, number: int, step_tokens: int) -> bool:
        """For a prompt of class `number`."""
        ahead = 0
        has_long = False
        for other_tokens, other_number in self.by_request.values():
            if other_number <= number:
                has_long |= other_tokens > step_tokens
                ahead += min(other_tokens, step_tokens)
        if tokens > step_tokens:
            return not has_long and ahead <= (STEPS_AHEAD - 1) * step_tokens
        return ahead + tokens <= STEPS_AHEAD * step_tokens

    def first_long_class(self, step_tokens: int) -> float:
        """The class of its longs that is served first; infinite where it has none."""
        classes = (number for tokens, number in self.by_request.values() if tokens > step_tokens)
        return min(classes, default=float("inf"))


class Router:
    def __init__(self) -> None:
        self._prefill: dict[WorkerId, _Prompts] = {}
        self._decode: dict[WorkerId, _Shares] = {}

    @property
    def empty(self) -> bool:
        """Nobody takes anything of any worker."""
        return not self._prefill and not self._decode

    def pick_prefill(
        self, workers: list[Worker], tokens: int, avoid: Collection[WorkerId], number: int = 0
    ) -> Worker | None:
        """The prefill worker with the fewest tokens to compute that may take `tokens` of class `number` more; None is
        "later"."""
        fitting = [w for w in workers if self._may_prefill(w, tokens, number)]
        return _least(fitting, avoid, lambda w: self.tokens_ahead(w.id))

    def pick_decode(self, workers: list[Worker], blocks: int, avoid: Collection[WorkerId]) -> Worker | None:
        """The decode worker with the fewest requests, by share of its batch, that has room for `blocks`."""
        fitting = [w for w in workers if self._may_decode(w, blocks)]
        return _least(fitting, avoid, lambda w: self._requests_decoding(w.id) / w.card.max_num_seqs)

    def assign(
        self,
        request_id: RequestId,
        prefill: WorkerId | None,
        decode: WorkerId | None,
        tokens: int,
        blocks: int,
        number: int = 0,
    ) -> None:
        """`number`: its class."""
        if prefill is not None:
            self._prefill.setdefault(prefill, _Prompts()).put(request_id, tokens, number)
        if decode is not None:
            self._decode.setdefault(decode, _Shares()).put(request_id, blocks)

    def prefilled(self, request_id: RequestId, worker: WorkerId | None) -> None:
        """The request's prompt is computed: it is no longer ahead of anybody at `worker`."""
        _drop(self._prefill, worker, request_id)

    def release(self, request_id: RequestId, prefill: WorkerId | None, decode: WorkerId | None) -> None:
        _drop(self._prefill, prefill, request_id)
        _drop(self._decode, decode, request_id)

    def tokens_ahead(self, worker: WorkerId) -> int:
        """Of all classes."""
        prompts = self._prefill.get(worker)
        return 0 if prompts is None else prompts.total

    def first_long_class(self, worker: Worker) -> float:
        """Prompts longer than a step are given to it if they are of a class before this one."""
        prompts = self._prefill.get(worker.id)
        if prompts is None or worker.card.whole_batches:
            return float("inf")
        return prompts.first_long_class(worker.card.max_num_batched_tokens)

    def _requests_decoding(self, worker: WorkerId) -> int:
        return len(self._decode.get(worker, _NOTHING).by_request)

    def _may_prefill(self, worker: Worker, tokens: int, number: int) -> bool:
        if worker.card.whole_batches:  # what its batch holds is all that limits it
            return True
        prompts = self._prefill.get(worker.id)
        return prompts is None or prompts.has_room(tokens, number, worker.card.max_num_batched_tokens)

    def _may_decode(self, worker: Worker, blocks: int) -> bool:
        shares = self._decode.get(worker.id)
        if shares is None:
            return True
        room = shares.total + blocks <= worker.card.blocks_total
        return room and len(shares.by_request) < worker.card.max_num_seqs


def _least(
    workers: list[Worker], avoid: Collection[WorkerId], load: Callable[[Worker], float]
) -> Worker | None:
    """The least loaded; workers to avoid only when there is no other; ties by order of registration."""
    preferred = [w for w in workers if w.id not in avoid] or workers
    return min(preferred, key=load, default=None)


def _drop(
    table: dict[WorkerId, _Shares] | dict[WorkerId, _Prompts], worker: WorkerId | None, request_id: RequestId
) -> None:
    shares = table.get(worker) if worker is not None else None
    if shares is not None and worker is not None:
        shares.drop(request_id)
        if not shares.by_request:
            del table[worker]
