"""One request's answer as it grows: token deltas in, pieces of text with their log-probabilities out. Pure.

Streamed or not, an answer is made here and token by token, so both have the same text, usage and reason, however
the tokens were grouped on the way.

What counts: `completion_tokens` are the tokens up to the one that ended the answer, which is included; tokens past
a stop string are thrown away. The token that ends an answer (the model's end token or one of `stop_token_ids`)
adds neither text nor an entry to the log-probabilities. A stop string found in the last tokens wins over "length".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import RequestFailed
from common.request import SamplingParams, TokenLogprobs
from coordinator.detokenizer import Detokenizer
from coordinator.gateway import TokenDelta

LOGPROB_FLOOR = -9999.0

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token with log-probabilities, which the first of a prompt has not. `offset` is where its text begins, in
    characters."""

    id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class Piece:
    """Text to show, never empty but in the last piece, and the tokens whose text is now whole.

    `finish` is set in the last piece, which has no text. Not frozen: one for every token.
    """

    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish: Finish | None = None


class Answer:
    """`text_bytes(id)` is what a token adds to the text. `first_offset` characters of the prompt are shown before it.
    An `empty` answer ends with the token that a worker cannot but compute, and shows nothing of it.
    """

    def __init__(
        self,
        text_bytes: Callable[[int], bytes],
        sampling: SamplingParams,
        stops: Sequence[str] = (),
        *,
        first_offset: int = 0,
        empty: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(text_bytes, stops, sampling.min_tokens)
        self._end_ids = frozenset(sampling.end_token_ids)
        self._scored = sampling.logprobs is not None
        self._waiting: deque[ScoredToken] = deque()
        self._waiting_ends: deque[int] = deque()
        self._first_offset = first_offset
        self._empty = empty
        self.plain = not (stops or empty or self._scored)
        """Its text is that of its tokens and nothing else: `push_token` will do for all but the last."""
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: Finish | None = None

    def push(self, delta: TokenDelta) -> list[Piece]:
        """The pieces that these tokens release; the last one ever has `finish`. Raises RequestFailed when the
        delta says that the request ended without an answer."""
        assert self.finish is None
        if delta.cached_tokens > self.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if self._empty and delta.ids:
            return [self._last("length", ())]
        pieces: list[Piece] = []
        ends = delta.finish == "stop" and bool(delta.ids) and delta.ids[-1] in self._end_ids
        texts = len(delta.ids) - 1 if ends else len(delta.ids)
        for index in range(texts):
            text = self._take(delta, index)
            if text:
                pieces.append(Piece(text, self._whole_tokens() if self._scored else ()))
            if self._detokenizer.stopped:
                pieces.append(self._last("stop", self._tokens_before_stop()))
                return pieces
        if delta.finish is None:
            return pieces
        if delta.finish not in ("stop", "length"):
            raise RequestFailed(f"The request ended early ({delta.finish}).", code=f"ended_by_{delta.finish}")
        self.completion_tokens += ends
        if rest := self._detokenizer.finish():
            pieces.append(Piece(rest, self._all_tokens()))
        pieces.append(self._last(delta.finish, self._all_tokens()))
        return pieces

    def push_token(self, token_id: int) -> str:
        """The text that one more token of a plain answer, not its last, makes safe to show."""
        self.completion_tokens += 1
        return self._detokenizer.push(token_id)

    def _last(self, finish: Finish, tokens: tuple[ScoredToken, ...]) -> Piece:
        self.finish = finish
        return Piece("", tokens, finish)

    def _take(self, delta: TokenDelta, index: int) -> str:
        self.completion_tokens += 1
        offset = self._first_offset + self._detokenizer.decoded_chars
        text = self._detokenizer.push(delta.ids[index])
        if self._scored:
            # A worker that was asked for log-probabilities sends one for each id; if not, that is said by a floor.
            logprobs = delta.logprobs[index] if delta.logprobs is not None else TokenLogprobs(LOGPROB_FLOOR)
            self._waiting.append(ScoredToken(delta.ids[index], finite(logprobs), offset))
            self._waiting_ends.append(self._first_offset + self._detokenizer.decoded_chars)
        return text

    def _whole_tokens(self) -> tuple[ScoredToken, ...]:
        """Tokens whose text is all released. One without text of its own goes with the text after it: until then
        it might turn out to be part of a stop string."""
        released = self._first_offset + self._detokenizer.released_chars
        tokens = []
        while self._waiting and self._waiting_ends[0] <= released and self._waiting[0].offset < released:
            tokens.append(self._waiting.popleft())
            self._waiting_ends.popleft()
        return tuple(tokens)

    def _tokens_before_stop(self) -> tuple[ScoredToken, ...]:
        """Tokens whose text begins before the stop string does."""
        released = self._first_offset + self._detokenizer.released_chars
        return tuple(token for token in self._waiting if token.offset < released)

    def _all_tokens(self) -> tuple[ScoredToken, ...]:
        tokens = tuple(self._waiting)
        self._waiting.clear()
        self._waiting_ends.clear()
        return tokens


def finite(logprobs: TokenLogprobs) -> TokenLogprobs:
    """JSON has no minus infinity."""
    if math.isfinite(logprobs.chosen) and all(math.isfinite(value) for _, value in logprobs.top):
        return logprobs
    return TokenLogprobs(_floor(logprobs.chosen), tuple((id, _floor(value)) for id, value in logprobs.top))


def _floor(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_FLOOR
