"""Answers in OpenAI's shapes, as bytes: chunks of a stream, whole responses, log-probabilities. Pure.

A stream sends one chunk for each token, so a chunk is a prefix made once, the text as JSON, and a suffix.

Names of tokens: the token's text, and where that is not whole UTF-8 its bytes escaped as OpenAI does, `\\xf0\\x9f`
in chat (whose `bytes` field has them as numbers) and `bytes:\\xf0\\x9f` in text completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.answer import Answer, Piece, ScoredToken

TokenBytes = Callable[[int], bytes]

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk and response of one request begins with."""

    id: str
    model: str
    created_s: int


def usage(prompt_tokens: int, answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(value).encode() + b"\n\n"


class ChunkShape:
    """Chunks of one stream: `begin` once, `piece` for each, `usage` if it was asked for, then DONE."""

    object = ""

    def __init__(self, heading: Heading, token_bytes: TokenBytes, include_usage: bool) -> None:
        self._token_bytes = token_bytes
        self._heading = heading
        self._usage_key: dict[str, Any] = {"usage": None} if include_usage else {}
        mark = "\x00"
        before, after = self._chunk(self._choice(mark, None, None)).split(_dumps(mark).encode())
        self._before, self._after = before, after

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if piece.text and not piece.tokens:
            return self._before + _dumps(piece.text).encode() + self._after
        return self._chunk(self._choice(piece.text, self._logprobs(piece.tokens), piece.finish))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head(), "choices": [], "usage": usage})

    def _head(self) -> dict[str, Any]:
        heading = self._heading
        return {
            "id": heading.id,
            "object": self.object,
            "created": heading.created_s,
            "model": heading.model,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head(), "choices": [choice], **self._usage_key})

    def _choice(self, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatChunks(ChunkShape):
    object = "chat.completion.chunk"

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._token_bytes) if tokens else None


class TextChunks(ChunkShape):
    object = "text_completion"

    def _choice(self, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return text_logprobs(tokens, self._token_bytes) if tokens else None


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer, ready to be written."""

    heading: Heading
    text: str
    tokens: Sequence[ScoredToken]
    scored: bool
    finish: str
    usage: dict[str, Any]


def whole_of(
    heading: Heading, pieces: Iterable[Piece], answer: Answer, prompt_tokens: int, scored: bool
) -> Whole:
    assert answer.finish is not None
    pieces = list(pieces)
    return Whole(
        heading,
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        scored,
        answer.finish,
        usage(prompt_tokens, answer),
    )


def chat_response(whole: Whole, token_bytes: TokenBytes) -> bytes:
    message = {"role": "assistant", "content": whole.text, "refusal": None}
    logprobs = chat_logprobs(whole.tokens, token_bytes) if whole.scored else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": whole.finish}
    return _response("chat.completion", whole, choice)


def text_response(whole: Whole, token_bytes: TokenBytes) -> bytes:
    logprobs = text_logprobs(whole.tokens, token_bytes) if whole.scored else None
    choice = {"index": 0, "text": whole.text, "logprobs": logprobs, "finish_reason": whole.finish}
    return _response("text_completion", whole, choice)


def _response(kind: str, whole: Whole, choice: dict[str, Any]) -> bytes:
    heading = whole.heading
    body = {"id": heading.id, "object": kind, "created": heading.created_s, "model": heading.model}
    return _dumps({**body, "choices": [choice], "usage": whole.usage}).encode()


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(id)
        return {"token": token_name(raw, ""), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **entry(token.id, token.logprobs.chosen),
            "top_logprobs": [entry(id, logprob) for id, logprob in token.logprobs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """The chosen token is always among the best ones, so there may be one more than was asked for."""

    def name(id: int) -> str:
        return token_name(token_bytes(id), "bytes:")

    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [token.logprobs.chosen for token in tokens],
        "top_logprobs": [
            {name(id): logprob for id, logprob in (*token.logprobs.top, (token.id, token.logprobs.chosen))}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def token_name(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
