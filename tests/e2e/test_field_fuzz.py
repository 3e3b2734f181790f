"""Every numeric field of both routes over every number that a client might send, on a real service.

The fields are read off the models of the request bodies, so one that is added there is tried here without a word.
Whatever is sent: an answer or OpenAI's error object, the same verdict streamed and whole, the same text where it is
taken; the workers live on, and a witness that is asked all the while says the same to the last bit.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from coordinator.openai.schema import ChatFields, TextFields
from tests.e2e.conftest import witness
from tests.e2e.service import MODEL, Service, strict_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODELS: dict[str, type[BaseModel]] = {CHAT: ChatFields, TEXT: TextFields}

MISSING = ""
RAW = (
    *(MISSING, "null", "0", "1", "-0.0", "-1", "NaN", "Infinity", "-Infinity", "1e-9", "1e309", "2147483648"),
    *("9223372036854775808", "18446744073709551616", '"1"', "true", "[]", "{}"),
)
"""As they stand in the body: half of these are no JSON, or no number that Python's parser keeps."""

BASE: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 7, "max_tokens": 2}
"""Sampled on both nodes: the second token is the decode worker's."""
PROMPT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "One, two,"},
}
SHORT: dict[str, Any] = {"logit_bias": {"2": 100}}  # the end token, where max_tokens does not end it
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "max_tokens": SHORT,
    "max_completion_tokens": SHORT,
    "stream_options": {"stream": True},
}
NUMBERS_WE_LEAVE_OUT = ("truncate_prompt_tokens", "thinking_token_budget", "prompt_logprobs")

Step = str | int
Place = tuple[Step, ...]


def places(model: type[BaseModel]) -> Iterator[Place]:
    """Where a number, or a container of numbers, may stand."""
    for name, field in model.model_fields.items():
        for inside in _inside(field.annotation, 4):
            yield (name, *inside)
    neutral: dict[str, tuple[Any, ...]] = getattr(model, "NEUTRAL", {})
    for name, values in neutral.items():
        if name in NUMBERS_WE_LEAVE_OUT or any(type(value) in (int, float) for value in values):
            yield (name,)


def _inside(annotation: Any, depth: int) -> Iterator[Place]:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (int, float, bool):
        yield ()
    elif depth == 0:
        return
    elif origin is Annotated:
        yield from _inside(args[0], depth)
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _inside(arg, depth)
    elif origin in (list, tuple, dict):
        step: Step = "5" if origin is dict else 0
        found = [(step, *inside) for inside in _inside(args[-1], depth - 1)]
        yield from [(), *found] if found else []
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from places(annotation)


@dataclass(frozen=True, slots=True)
class Try:
    path: str
    place: Place
    raw: str

    def body(self, stream: bool) -> bytes:
        name, *rest = self.place
        fields = BASE | PROMPT[self.path] | {"stream": stream} | COMPANIONS.get(str(name), {})
        if name == "max_completion_tokens":
            del fields["max_tokens"]
        fields.pop(str(name), None)
        if self.raw == MISSING:
            return json.dumps(fields).encode()
        if rest == ["KEY"]:  # a name in a map, not a value
            made = json.dumps({self.raw.strip('"'): 1})
        else:
            made = self.raw
            for step in reversed(rest):
                made = f"[{made}]" if isinstance(step, int) else f'{{"{step}": {made}}}'
        return f'{json.dumps(fields)[:-1]}, "{name}": {made}}}'.encode()

    @property
    def streams_alike(self) -> bool:
        return self.place[0] not in ("stream", "stream_options")

    @property
    def is_seeded(self) -> bool:
        return self.place != ("seed",) or self.raw not in (MISSING, "null")


@dataclass(frozen=True, slots=True)
class Verdict:
    status: int
    said: str  # the text, or the error's code and field


def tries() -> list[Try]:
    found: dict[Try, None] = {}
    for path, model in MODELS.items():
        for place, raw in product([*places(model), ("logit_bias", "KEY")], RAW):
            found[Try(path, place, raw)] = None
    return list(found)


class Connections:
    """A few that are kept, so that thousands of requests do not each make one."""

    def __init__(self, service: Service, count: int) -> None:
        self.count = count
        self._free: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()
        for _ in range(count):
            address = service.url.removeprefix("http://")
            self._free.put(http.client.HTTPConnection(address, timeout=60))

    def ask(self, one: Try, stream: bool) -> Verdict:
        connection = self._free.get()
        try:
            return _ask(connection, one, stream)
        finally:
            self._free.put(connection)

    def close(self) -> None:
        for _ in range(self.count):
            self._free.get().close()


def _ask(connection: http.client.HTTPConnection, one: Try, stream: bool) -> Verdict:
    connection.request("POST", one.path, one.body(stream), {"content-type": "application/json"})
    answer = connection.getresponse()
    data = answer.read().decode()
    if answer.status != 200:
        error = json.loads(data)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, (one, data)
        assert error["message"] and error["code"] and len(data) < 2000, (one, data)
        return Verdict(answer.status, f"{error['code']} {error['param']} {error['message']}")
    if "event-stream" not in answer.headers["content-type"]:
        return Verdict(200, "".join(map(_text, strict_json(data)["choices"])))
    *events, done, end = data.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), (one, data[-300:])
    chunks = [strict_json(event.removeprefix("data: ")) for event in events]
    return Verdict(200, "".join(_text(choice) for chunk in chunks for choice in chunk["choices"]))


def _text(choice: dict[str, Any]) -> str:
    return str(
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    )


def test_the_fields_are_found() -> None:
    """Those that the issue names, and nested ones."""
    chat, text = (set(places(model)) for model in MODELS.values())
    shared = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "n"}
    shared |= {"repetition_penalty", "max_tokens", "min_tokens", "priority", "logprobs"}
    assert {(name,) for name in shared} <= chat & text
    assert {("stop_token_ids", 0), ("logit_bias", "5"), ("stream_options", "include_usage")} <= chat & text
    assert {("max_completion_tokens",), ("top_logprobs",)} <= chat and ("prompt", 0) in text


def test_any_number_in_any_field(
    undisturbed: Service, text_ids: list[int], witnessed: dict[str, Any]
) -> None:
    service = undisturbed
    over = threading.Event()

    def watch() -> int:
        count = 0
        while not over.is_set():
            assert witness(service, text_ids) == witnessed
            count += 1
        return count

    connections = Connections(service, 24)

    def both(one: Try) -> tuple[Try, Verdict, Verdict]:
        return one, connections.ask(one, False), connections.ask(one, True)

    with closing(connections), ThreadPoolExecutor(1 + connections.count) as threads:
        watching = threads.submit(watch)
        try:
            found = list(threads.map(both, tries()))
        finally:
            over.set()
        assert watching.result() > 3
    for one, whole, streamed in found:
        assert {whole.status, streamed.status} <= {200, 400, 422}, (one, whole, streamed)
        if one.streams_alike:
            assert whole.status == streamed.status, (one, whole, streamed)
            assert whole.said == streamed.said or not one.is_seeded, (one, whole, streamed)
    taken = sum(whole.status == 200 for _, whole, _ in found)
    assert taken > 150 and len(found) - taken > 500, (taken, len(found))
