"""The front's ear: token rows from any worker become one gapless stream per request. Pure.

Each output index is accepted once, from whoever says it first: a token is a function of the request, so the
prefill worker's first token, the decode worker's repetition of it and a worker that comes back from the dead all
say the same. A row that starts beyond the next index shows that a message was lost; the coordinator is told and
starts a next attempt from what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.messages import FinishReason, Message, Progress, RequestFinished, TokenRow, Tokens
from common.request import Attempt, RequestId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens for one stream."""

    id: RequestId
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason | None
    cached_tokens: int | None


@dataclass(slots=True)
class _Stream:
    next_index: int = 0


class Front:
    def __init__(self) -> None:
        self._streams: dict[RequestId, _Stream] = {}
        self._last_seq: dict[tuple[str, int], int] = {}
        self.late_rows = 0
        self.lost_messages = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: RequestId) -> None:
        assert request_id not in self._streams
        self._streams[request_id] = _Stream()

    def close(self, request_id: RequestId) -> bool:
        """No more is wanted. Idempotent."""
        return self._streams.pop(request_id, None) is not None

    def accept(self, tokens: Tokens, worker: str, incarnation: int) -> tuple[list[Delta], list[Message]]:
        """One message of a worker. Returns what is new, and what the coordinator must hear."""
        self._count_lost(tokens.seq, worker, incarnation)
        deltas: list[Delta] = []
        progress: list[tuple[RequestId, int, tuple[int, ...]]] = []
        gaps: list[tuple[RequestId, Attempt]] = []
        finished: list[Message] = []
        for row in tokens.rows:
            stream = self._streams.get(row.id)
            if stream is None:
                self.late_rows += 1
                continue
            known = stream.next_index - row.first
            if known < 0:
                gaps.append((row.id, row.attempt))
                continue
            if known > len(row.ids) or (known == len(row.ids) and row.finish is None):
                continue  # said before
            new = row.ids[known:] if known else row.ids
            if new:
                progress.append((row.id, stream.next_index, new))
                stream.next_index += len(new)
            deltas.append(_delta(row, new, known))
            if row.finish is not None:
                del self._streams[row.id]
                finished.append(RequestFinished(row.id, row.finish))
        heard: list[Message] = [Progress(tuple(progress), tuple(gaps))] if progress or gaps else []
        return deltas, heard + finished

    def _count_lost(self, seq: int, worker: str, incarnation: int) -> None:
        source = (worker, incarnation)
        last = self._last_seq.pop(source, seq - 1)
        self._last_seq[source] = max(last, seq)
        self.lost_messages += max(0, seq - last - 1)
        if len(self._last_seq) > 4096:
            del self._last_seq[next(iter(self._last_seq))]


def _delta(row: TokenRow, new: tuple[int, ...], known: int) -> Delta:
    logprobs = row.logprobs[known:] if row.logprobs is not None and known else row.logprobs
    return Delta(row.id, new, logprobs, row.finish, row.cached_tokens)
