"""Reads the bytes of one streamed answer: when text came, what the server counted, how it ended. Pure.

The time of a chunk is when its first byte came. A chunk counts if it brings text: `text` of a completion, `content`,
`reasoning_content` or `reasoning` of a chat delta, or a tool call. Role chunks, chunks of half a character, usage and
comments count as nothing. Choice 0 alone is asked for.
"""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT_BYTES = 4 << 20
FIELDS = (b"event:", b"id:", b"retry:", b":")
"""What a line of an event stream may begin with beside data."""


class BadStream(Exception):
    """`kind` is a word for the table, the message what was seen."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AnswerStream:
    """`feed` every piece of the body; `leaving` is True once `leave_after` chunks with text are there."""

    __slots__ = (
        "_leave_after", "_pending", "_since_s", "cached_tokens", "done", "done_s", "finish_reason", "leaving",
        "output_tokens", "prompt_tokens", "request_id", "text_s",
    )  # fmt: skip

    def __init__(self, leave_after: int | None = None) -> None:
        self._leave_after = leave_after
        self._pending = b""
        self._since_s: float | None = None
        self.text_s: list[float] = []
        self.request_id = ""
        self.finish_reason = ""
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.leaving = False
        self.done = False
        self.done_s = 0.0

    def feed(self, data: bytes, now_s: float) -> None:
        """Raises BadStream."""
        if self._since_s is None:
            self._since_s = now_s
        lines = (self._pending + data).split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > MAX_EVENT_BYTES:
            raise BadStream("bad_stream", f"a line of more than {MAX_EVENT_BYTES} bytes")
        since_s = self._since_s
        for line in lines:
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), since_s)
            elif line.strip() and not line.startswith(FIELDS):
                raise BadStream("bad_stream", f"no event: {line[:80]!r}")
            since_s = now_s  # what follows in this piece began in it
        self._since_s = since_s if self._pending else None

    def end(self, now_s: float) -> None:
        """The body is over. Raises BadStream where the answer was not, or brought nothing."""
        if not self.done:
            raise BadStream(
                "truncated", f"the stream ended without [DONE] after {len(self.text_s)} chunks of text"
            )
        if not self.text_s:
            raise BadStream(
                "no_text", f"the answer ended ({self.finish_reason or 'no reason'}) without any text"
            )

    def _data(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.done, self.done_s = True, at_s
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BadStream("bad_stream", f"no JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise BadStream("bad_stream", f"no object: {data[:80]!r}")
        try:
            self._event(event, at_s)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError):
            raise BadStream("bad_stream", f"no chunk of an answer: {data[:80]!r}") from None

    def _event(self, event: dict[str, Any], at_s: float) -> None:
        if (error := event.get("error")) is not None:
            message = error.get("message", "") if isinstance(error, dict) else str(error)
            raise BadStream("error_event", str(message)[:200])
        if not self.request_id:
            self.request_id = str(event.get("id") or "")
        if (usage := event.get("usage")) is not None:
            self._usage(usage)
        for choice in event["choices"][:1]:
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
            if choice.get("text") or _delta_has_text(choice.get("delta")):
                self.text_s.append(at_s)
                self.leaving = self._leave_after is not None and len(self.text_s) >= self._leave_after

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = int(usage["prompt_tokens"])
        self.output_tokens = int(usage["completion_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.cached_tokens = None if cached is None else int(cached)


def _delta_has_text(delta: dict[str, Any] | None) -> bool:
    if not delta:
        return False
    said = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return bool(said or delta.get("tool_calls"))
