"""The front's ear: token rows from any worker become one gapless stream per request. Pure.

Each output index is accepted once, from whoever says it first: a token is a function of the request, so the
prefill worker's first token, the decode worker's repetition of it and a worker that comes back from the dead all
say the same. A row that starts beyond the next index is kept for a moment; when what lies before it has not come
after `gap_after_s`, a message was lost: the coordinator is told and starts a next attempt from what was accepted.

Log-probabilities of a prompt, where they are asked for, are taken in the same way and come first: until they are
complete every token row is early. So an attempt that starts from accepted tokens owes none of the prompt's.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from common.front_messages import Progress, RequestFinished
from common.messages import FinishReason, Message, PromptRow, TokenRow, Tokens
from common.request import RequestId, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """New tokens for one stream, or log-probabilities of the next tokens of its prompt. Not frozen, like TokenRow: one
    for every token."""

    id: RequestId
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason | None
    cached_tokens: int | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


_PROMPT_FIRST = -1
"""The next index of a stream whose prompt is not complete: every token row lies beyond it."""


@dataclass(slots=True)
class _Stream:
    next_index: int = 0
    early: list[TokenRow] = field(default_factory=list)  # rows beyond the next index, by index
    early_since: float = 0.0
    next_prompt: int = 0  # index of the prompt token whose log-probability comes next
    prompt_end: int = 0
    early_prompts: list[PromptRow] = field(default_factory=list)


MAX_EARLY_ROWS = 256


class Front:
    def __init__(self, *, gap_after_s: float = 0.5) -> None:
        self._gap_after_s = gap_after_s
        self._streams: dict[RequestId, _Stream] = {}
        self._gapped: dict[RequestId, None] = {}
        self._last_seq: dict[tuple[str, int], int] = {}
        self.late_rows = 0
        self.lost_messages = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: RequestId, scored_prompt_tokens: int = 0) -> None:
        """`scored_prompt_tokens`: see `Request`."""
        assert request_id not in self._streams
        stream = self._streams[request_id] = _Stream()
        if scored_prompt_tokens > 1:
            stream.next_index, stream.next_prompt, stream.prompt_end = _PROMPT_FIRST, 1, scored_prompt_tokens

    def close(self, request_id: RequestId) -> bool:
        """No more is wanted. Idempotent."""
        self._gapped.pop(request_id, None)
        return self._streams.pop(request_id, None) is not None

    def accept(
        self, tokens: Tokens, worker: str, incarnation: int, now: float
    ) -> tuple[list[Delta], list[Message]]:
        """One message of a worker. Returns what is new, and what the coordinator must hear."""
        self._count_lost(tokens.seq, worker, incarnation)
        deltas: list[Delta] = []
        progress: list[tuple[RequestId, int, tuple[int, ...]]] = []
        finished: list[Message] = []
        for prompt in tokens.prompts:
            self._prompt(prompt, deltas, progress, finished, now)
        streams = self._streams
        for row in tokens.rows:
            request_id, first, ids = row.id, row.first, row.ids
            stream = streams.get(request_id)
            if stream is None:
                self.late_rows += 1
            elif first == stream.next_index and not stream.early and row.finish is None:
                # What nearly every row is: the next tokens of a stream in order.
                progress.append((request_id, first, ids))
                stream.next_index = first + len(ids)
                deltas.append(Delta(request_id, ids, row.logprobs, None, row.cached_tokens))
            elif first > stream.next_index:
                self._keep(stream, row, now)
            else:
                self._take(stream, row, deltas, progress, finished)
                if stream.early:
                    self._take_early(request_id, stream, deltas, progress, finished)
                    stream.early_since = now
        heard: list[Message] = [Progress(tuple(progress))] if progress else []
        return deltas, heard + finished

    def gaps(self, now: float) -> list[Message]:
        """Streams whose next token did not come though later ones did. To be called now and then."""
        rows = []
        for request_id in list(self._gapped):
            stream = self._streams[request_id]
            if now - stream.early_since >= self._gap_after_s:
                early: list[TokenRow | PromptRow] = [*stream.early, *stream.early_prompts]
                rows.append((request_id, max(row.attempt for row in early)))
                stream.early.clear()
                stream.early_prompts.clear()
                del self._gapped[request_id]
        return [Progress((), tuple(rows))] if rows else []

    def _prompt(
        self,
        row: PromptRow,
        deltas: list[Delta],
        progress: list[tuple[RequestId, int, tuple[int, ...]]],
        finished: list[Message],
        now: float,
    ) -> None:
        stream = self._streams.get(row.id)
        if stream is None or row.first >= stream.prompt_end:
            self.late_rows += 1
        elif row.first > stream.next_prompt:
            self._wait(stream, row.id, now)
            if len(stream.early_prompts) < MAX_EARLY_ROWS:
                insort(stream.early_prompts, row, key=lambda r: r.first)
        elif _take_prompt(stream, row, deltas):
            while stream.early_prompts and stream.early_prompts[0].first <= stream.next_prompt:
                _take_prompt(stream, stream.early_prompts.pop(0), deltas)
            stream.early_since = now
            if stream.next_prompt >= stream.prompt_end:
                stream.next_index = 0
                self._take_early(row.id, stream, deltas, progress, finished)
            elif not stream.early and not stream.early_prompts:
                self._gapped.pop(row.id, None)

    def _wait(self, stream: _Stream, request_id: RequestId, now: float) -> None:
        """Something came before its time."""
        if request_id not in self._gapped:
            stream.early_since = now
            self._gapped[request_id] = None

    def _keep(self, stream: _Stream, row: TokenRow, now: float) -> None:
        self._wait(stream, row.id, now)
        if len(stream.early) < MAX_EARLY_ROWS:
            insort(stream.early, row, key=lambda r: r.first)

    def _take_early(
        self,
        request_id: RequestId,
        stream: _Stream,
        deltas: list[Delta],
        progress: list[tuple[RequestId, int, tuple[int, ...]]],
        finished: list[Message],
    ) -> None:
        while stream.early and stream.early[0].first <= stream.next_index and request_id in self._streams:
            self._take(stream, stream.early.pop(0), deltas, progress, finished)
        if not stream.early:
            self._gapped.pop(request_id, None)

    def _take(
        self,
        stream: _Stream,
        row: TokenRow,
        deltas: list[Delta],
        progress: list[tuple[RequestId, int, tuple[int, ...]]],
        finished: list[Message],
    ) -> None:
        """A row that starts at or before the next index."""
        known = stream.next_index - row.first
        if known > len(row.ids) or (known == len(row.ids) and row.finish is None):
            if row.cached_tokens:
                # The tokens were said before; that the decode worker had more of the prompt was not.
                deltas.append(Delta(row.id, (), None, None, row.cached_tokens))
            return
        new = row.ids[known:] if known else row.ids
        if new:
            progress.append((row.id, stream.next_index, new))
            stream.next_index += len(new)
        deltas.append(_delta(row, new, known))
        if row.finish is not None:
            self.close(row.id)
            finished.append(RequestFinished(row.id, row.finish))

    def _count_lost(self, seq: int, worker: str, incarnation: int) -> None:
        source = (worker, incarnation)
        last = self._last_seq.pop(source, seq - 1)
        self._last_seq[source] = max(last, seq)
        self.lost_messages += max(0, seq - last - 1)
        if len(self._last_seq) > 4096:
            del self._last_seq[next(iter(self._last_seq))]


def _take_prompt(stream: _Stream, row: PromptRow, deltas: list[Delta]) -> bool:
    """A row that starts at or before the next prompt token; whether it brought anything new."""
    new = row.logprobs[stream.next_prompt - row.first : stream.prompt_end - row.first]
    if not new:
        return False
    stream.next_prompt += len(new)
    deltas.append(Delta(row.id, (), None, None, None, new))
    return True


def _delta(row: TokenRow, new: tuple[int, ...], known: int) -> Delta:
    logprobs = row.logprobs[known:] if row.logprobs is not None and known else row.logprobs
    return Delta(row.id, new, logprobs, row.finish, row.cached_tokens)
