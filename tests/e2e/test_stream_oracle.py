"""Some tens of requests to a real service, each whole, streamed and streamed with usage: all three the same.

The grid of thousands is `tests/coordinator/test_stream_oracle.py`, over scripted ids; here the tokens are the
model's, several answers run at once, and the bytes cross every process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from coordinator.tokenizer import Tokenizer
from tests.e2e.service import MODEL, Service, strict_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMOJI = {"10813": 90, "242": 90, "218": 90, "228": 90}
"""Tokens that are parts of emoji: together they are text, junk, or a character cut at the end."""
CJK = {str(id): 60 for id in (178, 186, 194, 227, 235, 244, 173, 111)}
NUMBERS: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "schema": {
            "type": "object",
            "properties": {"é": {"enum": ["😀", "好"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["é", "n"],
            "additionalProperties": False,
        },
    },
}
COUNT = "One, two, three, four,"
STORY = "Tell me a story about a ferry."


def grid() -> list[tuple[str, dict[str, Any]]]:
    """Routes and fields, each of another kind."""
    seeded: dict[str, Any] = {"temperature": 1, "seed": 11, "top_p": 0.9}
    kinds: list[dict[str, Any]] = [
        {},
        {**seeded, "frequency_penalty": 0.5},
        {**seeded, "repetition_penalty": 1.3, "top_k": 20, "min_p": 0.02},
        {"min_tokens": 12, **seeded, "seed": 3},
        {"ignore_eos": True, "logit_bias": {"2": 20}, **seeded},
        {"logit_bias": {"2": 100}},
        {"stop_token_ids": [28, 30], "min_tokens": 3},
        *(
            {"logit_bias": EMOJI, **seeded, "seed": seed, "max_tokens": tokens}
            for seed, tokens in ((1, 7), (2, 8), (3, 9))
        ),
        *(
            {"logit_bias": CJK, **seeded, "seed": seed, "max_tokens": tokens}
            for seed, tokens in ((1, 7), (2, 8))
        ),
        {"response_format": {"type": "json_object"}, **seeded},
        {"response_format": NUMBERS, **seeded, "max_tokens": 20},
        {"logit_bias": EMOJI, **seeded, "stop": ["😀", "\ufffd\ufffd"]},
    ]
    requests = []
    for index, kind in enumerate(kinds):
        for path in (CHAT, TEXT):
            scored = (None, 0, 5, 20)[(index + (path == CHAT)) % 4]
            requests.append((path, kind | _logprobs(path, scored)))
    requests += [(TEXT, {"echo": True, **seeded, **_logprobs(TEXT, top)}) for top in (None, 0, 3)]
    requests += [(TEXT, {"echo": True, "max_tokens": 0, **_logprobs(TEXT, 2)})]
    return requests


def _logprobs(path: str, top: int | None) -> dict[str, Any]:
    if top is None:
        return {}
    return {"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    prompt: dict[str, Any] = {"prompt": COUNT}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": STORY}]}
    return base | prompt | fields


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, however it came."""

    text: str
    finish: str
    logprobs: dict[str, list[Any]]
    usage: dict[str, Any] | None

    @property
    def counted(self) -> dict[str, Any]:
        """Usage but for what depends on who asked before."""
        assert self.usage is not None
        return {name: count for name, count in self.usage.items() if name != "prompt_tokens_details"}


def ask(service: Service, path: str, body: dict[str, Any]) -> Said:
    answer = service.post(path, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        whole = strict_json(answer.text)
        (choice,) = whole["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        return Said(text, choice["finish_reason"], _lists([choice["logprobs"]]), whole["usage"])
    return gathered(answer, path, body)


def gathered(answer: httpx.Response, path: str, body: dict[str, Any]) -> Said:
    """One answer out of its chunks, each held to its form."""
    counted = "stream_options" in body
    *blocks, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [strict_json(block.removeprefix("data: ")) for block in blocks]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    usage = chunks.pop()["usage"] if counted else None
    assert all(("usage" in chunk) == counted and not chunk.get("usage") for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    if path == CHAT:
        first = choices.pop(0)
        assert first["delta"] == {"role": "assistant", "content": ""}
    *shown, last = choices
    texts = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in shown]
    assert all(texts) and all(choice["finish_reason"] is None for choice in shown)
    echoed = 1 if body.get("echo") else 0  # the prompt is one chunk
    for choice in shown[echoed:]:  # one token a chunk, unless text was held back
        entries = _lists([choice["logprobs"]])
        if entries and len(next(iter(entries.values()))) > 1 and "stop" not in body:
            assert _was_held_back(entries), choice
    # What is held back to the end is a chunk too, such as a character that was cut.
    assert usage is None or len(texts) <= echoed + usage["completion_tokens"] + 1
    return Said("".join(texts), last["finish_reason"], _lists([c["logprobs"] for c in choices]), usage)


def _was_held_back(entries: dict[str, list[Any]]) -> bool:
    """All but the last token of the chunk end in the middle of a character."""
    names = [e["token"] for e in entries["content"]] if "content" in entries else entries["tokens"]
    return any("\\x" in name for name in names)


def _lists(parts: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Log-probabilities of all chunks in one; empty where there is not one entry."""
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in (part or {}).items():
            if value:
                joined.setdefault(name, []).extend(value)
    return joined


def check(service: Service) -> Callable[[tuple[str, dict[str, Any]]], Said]:
    def check_one(request: tuple[str, dict[str, Any]]) -> Said:
        path, fields = request
        body = body_of(path, fields)
        whole = ask(service, path, body)
        streamed = ask(service, path, body | {"stream": True})
        counted = ask(service, path, body | {"stream": True, "stream_options": {"include_usage": True}})
        for other in (streamed, counted):
            assert (other.text, other.finish) == (whole.text, whole.finish), request
            assert other.logprobs == whole.logprobs, request
        assert counted.counted == whole.counted, request
        if whole.logprobs and path == CHAT:
            raw = b"".join(bytes(entry["bytes"]) for entry in whole.logprobs["content"])
            text = raw.replace(b"<|im_end|>", b"").decode("utf-8", "replace")
            assert "stop" in fields or text == whole.text
        return whole

    return check_one


def test_streamed_is_whole(undisturbed: Service) -> None:
    requests = grid()
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(check(undisturbed), requests))
    texts = [answer.text for answer in answers]
    assert any("\ufffd" in text for text in texts) and any("😀" in text or "😊" in text for text in texts)
    assert len(set(texts)) > len(texts) // 2, "answers that are all alike would prove nothing"
    assert {answer.finish for answer in answers} == {"stop", "length"}


def test_a_stop_anywhere_in_what_the_model_says(undisturbed: Service) -> None:
    """Stops taken from a free answer: inside a token, over two and over three, at its very end, and never."""
    whole = ask(undisturbed, TEXT, body_of(TEXT, {"max_tokens": 16, "logprobs": 0}))
    text = whole.text
    cuts = [(begin, begin + size) for begin in (1, 5, len(text) // 2, len(text) - 7) for size in (1, 4, 7)]
    stops = [text[begin:end] for begin, end in cuts]
    requests = [
        (TEXT, {"max_tokens": 16, "stop": [stop, text[-3:] + "never"], "logprobs": 0}) for stop in stops
    ]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(check(undisturbed), requests))
    assert [answer.text for answer in answers] == [text[: text.index(stop)] for stop in stops]
    assert {answer.finish for answer in answers} == {"stop"}
    for answer in answers:
        ends = answer.counted["completion_tokens"]
        assert answer.logprobs == {} or len(answer.logprobs["tokens"]) <= ends
        assert all(offset < len(answer.text) for offset in answer.logprobs.get("text_offset", []))


def test_what_was_cached_is_said_wherever_it_lay(
    undisturbed: Service, text_ids: list[int], smollm2_dir: Path
) -> None:
    """In the prefill worker's cache, whole and streamed; then in the decode worker's, which alone has the answer
    that the prompt now goes on with."""
    prompt = text_ids[1100:1150]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    first = ask(undisturbed, TEXT, body | {"max_tokens": 16, "logprobs": 0})
    body |= {"max_tokens": 2}
    again = ask(undisturbed, TEXT, body)
    streamed = ask(undisturbed, TEXT, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert [cached_tokens(said) for said in (first, again, streamed)] == [0, 48, 48]
    tokenizer = Tokenizer(smollm2_dir)
    id_of = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    tokenizer.close()
    answer = [id_of[name.encode()] for name in first.logprobs["tokens"]]
    # Of 66 tokens the decode worker has computed all but the last: four whole blocks.
    assert cached_tokens(ask(undisturbed, TEXT, body | {"prompt": [*prompt, *answer]})) == 64


def cached_tokens(said: Said) -> int:
    assert said.usage is not None
    return int(said.usage["prompt_tokens_details"]["cached_tokens"])
