"""Answers in OpenAI's shapes, as bytes: chunks of a stream, whole responses, log-probabilities. Pure.

A stream sends one chunk for each token, so a chunk is a prefix made once, the text as JSON, and a suffix.

Names of tokens: the token's text, and where that is not whole UTF-8 its bytes escaped as OpenAI does, `\\xf0\\x9f`
in chat (whose `bytes` field has them as numbers) and `bytes:\\xf0\\x9f` in text completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from common.request import TokenLogprobs
from coordinator.answer import Piece, ScoredToken
from coordinator.tools.use import CallShapes, ToolUse

TokenBytes = Callable[[int], bytes]

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"
PART_ITEMS = 256


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk and response of one request begins with."""

    id: str
    model: str
    created_s: int
    tier: str
    fingerprint: str

    def fields(self, object: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "service_tier": self.tier,
            "system_fingerprint": self.fingerprint,
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(value).encode() + b"\n\n"


class ChunkShape:
    """Chunks of one stream: `begin` for each choice, `piece` for each piece, `usage` if it was asked for, then DONE."""

    object = ""

    def __init__(
        self, heading: Heading, token_bytes: TokenBytes, include_usage: bool, tools: ToolUse | None = None
    ) -> None:
        self._token_bytes = token_bytes
        self._tools = tools
        self._heading = heading
        self._usage_key: dict[str, Any] = {"usage": None} if include_usage else {}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def begin(self, choice: int) -> bytes:
        return b""

    def piece(self, choice: int, piece: Piece) -> bytes:
        if piece.text and not piece.tokens:
            return self.text(choice, piece.text)
        return self._chunk(self._choice(choice, piece.text, self._logprobs(piece.tokens), piece.finish))

    def text(self, choice: int, text: str) -> bytes:
        """The chunk of a piece that is text alone, where no tools may be called."""
        before, after = self._around_text.get(choice) or self._prepare(choice)
        return before + encode_basestring(text).encode() + after

    def _prepare(self, choice: int) -> tuple[bytes, bytes]:
        """What every chunk of text of this choice has before and after the text."""
        mark = "\x00"
        before, after = self._chunk(self._choice(choice, mark, None, None)).split(_dumps(mark).encode())
        self._around_text[choice] = before, after
        return before, after

    def usage(self, usage: dict[str, Any]) -> bytes:
        return event({**self._heading.fields(self.object), "choices": [], "usage": usage})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._heading.fields(self.object), "choices": [choice], **self._usage_key})

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatChunks(ChunkShape):
    """Where tools may be called, a piece may become no chunk or several, each with a delta of its own."""

    object = "chat.completion.chunk"

    def __init__(
        self, heading: Heading, token_bytes: TokenBytes, include_usage: bool, tools: ToolUse | None = None
    ) -> None:
        super().__init__(heading, token_bytes, include_usage, tools)
        self._calls: dict[int, CallShapes] = {}
        self._waiting: dict[int, list[ScoredToken]] = {}

    def piece(self, choice: int, piece: Piece) -> bytes:
        if self._tools is None:
            return super().piece(choice, piece)
        if choice not in self._calls:
            self._calls[choice] = CallShapes(self._tools, self._heading.id, choice)
        calls = self._calls[choice]
        waiting = self._waiting.setdefault(choice, [])
        waiting += piece.tokens
        deltas = calls.deltas(piece.text, piece.finish)
        chunks = [self._delta(choice, delta, self._taken(waiting), None) for delta in deltas]
        if piece.finish is not None:
            chunks.append(self._delta(choice, {}, self._taken(waiting), calls.finish(piece.finish)))
        return b"".join(chunks)

    def _taken(self, waiting: list[ScoredToken]) -> dict[str, Any] | None:
        logprobs = self._logprobs(waiting)
        waiting.clear()
        return logprobs

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def begin(self, choice: int) -> bytes:
        return self._delta(choice, {"role": "assistant", "content": ""}, None, None)

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._token_bytes) if tokens else None


class TextChunks(ChunkShape):
    object = "text_completion"

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return text_logprobs(tokens, self._token_bytes) if tokens else None


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One whole answer."""

    text: str
    tokens: Sequence[ScoredToken]
    scored: bool
    finish: str


@dataclass(frozen=True, slots=True)
class Whole:
    """All answers of one request, ready to be written: a choice's index is its place here."""

    heading: Heading
    choices: Sequence[WholeChoice]
    usage: dict[str, Any]
    tools: ToolUse | None = None


def whole_choice(pieces: Sequence[Piece], finish: str, scored: bool) -> WholeChoice:
    return WholeChoice(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        scored,
        finish,
    )


def chat_response(whole: Whole, token_bytes: TokenBytes) -> bytes:
    def show(index: int, choice: WholeChoice) -> dict[str, Any]:
        said, finish = {"content": choice.text, "refusal": None}, choice.finish
        if whole.tools is not None:
            calls = CallShapes(whole.tools, whole.heading.id, index)
            said, finish = calls.message(choice.text), calls.finish(finish)
        logprobs = chat_logprobs(choice.tokens, token_bytes) if choice.scored else None
        message = {"role": "assistant", **said}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    return _response("chat.completion", whole, show)


def text_response(whole: Whole, token_bytes: TokenBytes) -> bytes:
    def show(index: int, choice: WholeChoice) -> dict[str, Any]:
        logprobs = text_logprobs(choice.tokens, token_bytes) if choice.scored else None
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}

    return _response("text_completion", whole, show)


def _response(kind: str, whole: Whole, show: Callable[[int, WholeChoice], dict[str, Any]]) -> bytes:
    choices = [show(index, choice) for index, choice in enumerate(whole.choices)]
    return _in_parts({**whole.heading.fields(kind), "choices": choices, "usage": whole.usage}).encode()


def _in_parts(value: Any) -> str:
    """The same text as `_dumps`, which stops every thread until it is done: an echoed prompt with its alternatives is
    megabytes. So a long list is written a part at a time."""
    if isinstance(value, dict):
        return "{" + ",".join([f"{_dumps(name)}:{_in_parts(item)}" for name, item in value.items()]) + "}"
    if not isinstance(value, list):
        return _dumps(value)
    if len(value) <= PART_ITEMS:
        return "[" + ",".join([_in_parts(item) for item in value]) + "]"
    parts = [value[at : at + PART_ITEMS] for at in range(0, len(value), PART_ITEMS)]
    return "[" + ",".join([_dumps(part)[1:-1] for part in parts]) + "]"


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
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """The chosen token is always among the best ones, so there may be one more than was asked for. The first token
    of a prompt has a text and nothing else."""

    def name(id: int) -> str:
        return token_name(token_bytes(id), "bytes:")

    def best(chosen: int, logprobs: TokenLogprobs) -> dict[str, float]:
        return {name(id): logprob for id, logprob in (*logprobs.top, (chosen, logprobs.chosen))}

    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else token.logprobs.chosen for token in tokens],
        "top_logprobs": [
            None if token.logprobs is None else best(token.id, token.logprobs) for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def token_name(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
