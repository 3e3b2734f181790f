"""Which pair of workers gets a request: the least loaded of each pool that has room for it. Pure.

A prefill worker is given about two steps of prompt tokens ahead and no more, so that order, aborts and deaths
cost little; a decode worker as many requests as its batch holds and as many blocks as they need now, plus one
each to grow into. What is in flight is counted here by dispatch and end, not by heartbeats, which lag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from coordinator.registry import Worker
from common.request import RequestId, WorkerId

STEPS_AHEAD = 2


@dataclass(slots=True)
class _Share:
    """What one request takes of one worker."""

    prefill_tokens: int
    blocks: int


class Router:
    def __init__(self) -> None:
        self._prefill: dict[WorkerId, dict[RequestId, _Share]] = {}
        self._decode: dict[WorkerId, dict[RequestId, _Share]] = {}

    def pick_prefill(self, workers: list[Worker], tokens: int, avoid: Collection[WorkerId]) -> Worker | None:
        """The prefill worker with the fewest tokens ahead that may take `tokens` more; None is "later"."""
        fitting = [w for w in workers if self._may_prefill(w, tokens)]
        return _least(fitting, avoid, lambda w: self.tokens_ahead(w.id))

    def pick_decode(self, workers: list[Worker], blocks: int, avoid: Collection[WorkerId]) -> Worker | None:
        """The decode worker with the fewest requests, by share of its batch, that has room for `blocks`."""
        fitting = [w for w in workers if self._may_decode(w, blocks)]
        return _least(fitting, avoid, lambda w: len(self._decode.get(w.id, ())) / w.card.max_num_seqs)

    def assign(
        self, request_id: RequestId, prefill: WorkerId | None, decode: WorkerId | None, tokens: int, blocks: int
    ) -> None:
        share = _Share(tokens, blocks)
        if prefill is not None:
            self._prefill.setdefault(prefill, {})[request_id] = share
        if decode is not None:
            self._decode.setdefault(decode, {})[request_id] = share

    def prefilled(self, request_id: RequestId, worker: WorkerId | None) -> None:
        """The request's prompt is computed: it is no longer ahead of anybody at `worker`."""
        _drop(self._prefill, worker, request_id)

    def release(self, request_id: RequestId, prefill: WorkerId | None, decode: WorkerId | None) -> None:
        _drop(self._prefill, prefill, request_id)
        _drop(self._decode, decode, request_id)

    def tokens_ahead(self, worker: WorkerId) -> int:
        return sum(share.prefill_tokens for share in self._prefill.get(worker, {}).values())

    def requests_at(self, worker: WorkerId) -> int:
        return len(self._decode.get(worker, ())) + len(self._prefill.get(worker, ()))

    def _may_prefill(self, worker: Worker, tokens: int) -> bool:
        ahead = self.tokens_ahead(worker.id)
        return ahead == 0 or ahead + tokens <= STEPS_AHEAD * worker.card.max_num_batched_tokens

    def _may_decode(self, worker: Worker, blocks: int) -> bool:
        shares = self._decode.get(worker.id, {})
        if not shares:
            return True
        taken = sum(share.blocks for share in shares.values())
        return len(shares) < worker.card.max_num_seqs and taken + blocks <= worker.card.blocks_total


def _least(workers: list[Worker], avoid: Collection[WorkerId], load: Callable[[Worker], float]) -> Worker | None:
    """The least loaded; workers to avoid only when there is no other; ties by order of registration."""
    preferred = [w for w in workers if w.id not in avoid] or workers
    return min(preferred, key=load, default=None)


def _drop(table: dict[WorkerId, dict[RequestId, _Share]], worker: WorkerId | None, request_id: RequestId) -> None:
    shares = table.get(worker) if worker is not None else None
    if shares is not None and worker is not None:
        shares.pop(request_id, None)
        if not shares:
            del table[worker]
