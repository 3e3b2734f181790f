"""A client that hears everything of one request, whatever its end: for services that are killed or told to leave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.service import completion


@dataclass(slots=True)
class Heard:
    """What a client got of one request: the status, text, and the error that ended it."""

    status: int = 0
    text: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    over: bool = False


def listen(url: str, prompt: list[int], stream: bool, begun: Callable[[], object], **fields: Any) -> Heard:
    """`begun` is called when the first text of a stream is there."""
    heard = Heard()
    body = completion(prompt, stream=stream, **fields)
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        heard.status = answer.status_code
        if not stream or answer.status_code != 200:
            heard.error = json.loads(answer.read()).get("error", {})
            return heard
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                heard.over = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                heard.error = event.get("error", heard.error)
                text = "" if "error" in event else event["choices"][0]["text"]
                if text and not heard.text:
                    begun()
                heard.text += text
    return heard


def until(done: Callable[[], object], otherwise: str, limit_s: float = 60.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < limit_s, otherwise
        time.sleep(0.02)
    return time.monotonic() - began
