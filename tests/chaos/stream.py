"""One streamed completion over a socket of its own, in a thread, that can be left at any moment."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from tests.e2e.service import completion

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`error` is what the service said of a failure, "hung up" where it left without [DONE]."""

    text: str
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Stream:
    """`longest_gap_s`: between two pieces of text, or the question and the first."""

    def __init__(self, port: int, prompt: list[int], **fields: Any) -> None:
        body = completion(prompt, stream=True, stream_options={"include_usage": True}, **fields)
        self._body = json.dumps(body)
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._pieces = threading.Condition()
        self._heard = 0
        self._text = ""
        self._answer: Answer | None = None
        self.longest_gap_s = 0.0
        self.left = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_tokens(self, count: int, limit_s: float = 30.0) -> None:
        """Until so many events with text have come, or the answer is over."""
        with self._pieces:
            done = self._pieces.wait_for(lambda: self._heard >= count or self._answer is not None, limit_s)
            assert done and self._heard >= count, f"{self._heard} of {count} pieces: {self._answer}"

    def leave(self) -> None:
        """The client is gone, without a word."""
        self.left = True
        with contextlib.suppress(OSError):  # the answer has just ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)

    def answer(self, limit_s: float = LIMIT_S) -> Answer:
        self._thread.join(limit_s)
        assert self._answer is not None, f"no end within {limit_s:g} s, {self._heard} pieces came"
        return self._answer

    @property
    def is_over(self) -> bool:
        return self._answer is not None

    def _read(self) -> None:
        try:
            answer = self._answer_of(self._ask(), time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            answer = Answer(self._text, error=f"hung up: {error!r}")
        finally:
            self._socket.close()
        with self._pieces:
            self._answer = answer
            self._pieces.notify_all()

    def _ask(self) -> http.client.HTTPResponse:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n"
        self._socket.sendall(f"{head}content-type: application/json\r\n\r\n{self._body}".encode())
        response = http.client.HTTPResponse(self._socket, method="POST")
        response.begin()
        return response

    def _answer_of(self, response: http.client.HTTPResponse, heard_at: float) -> Answer:
        if response.status != 200:
            return Answer("", error=f"{response.status} {response.read().decode()}")
        finish, usage = "", {"prompt_tokens": 0, "completion_tokens": 0}
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return Answer(self._text, finish, usage["prompt_tokens"], usage["completion_tokens"])
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                return Answer(self._text, error=json.dumps(event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                self._text += choice["text"]
                finish = choice["finish_reason"] or finish
                with self._pieces:
                    self._heard += 1
                    self._pieces.notify_all()
            self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - heard_at)
            heard_at = time.monotonic()
        return Answer(self._text, error="hung up")
