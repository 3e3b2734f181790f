"""Several answers to one request, on a real service: the same streamed and whole, nothing left of who leaves."""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.service import Service, chat, completion, events

PROMPTS = ["The ferry crosses the river because the bridge", "A queue is a line in which one waits until"]


def streamed(service: Service, path: str, body: dict[str, Any]) -> tuple[dict[int, str], dict[str, Any]]:
    """Text by index, and the usage."""
    texts: dict[int, str] = {}
    usage: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{service.url}/v1/{path}", json=asked, timeout=60) as answer:
        for event in events(answer.iter_lines()):
            for choice in event["choices"]:
                new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + new
            usage = event["usage"] or usage
    return texts, usage


def test_three_answers_streamed_and_whole(undisturbed: Service) -> None:
    body = {**chat("Name a river.", max_tokens=12), "n": 3, "seed": 4, "temperature": 1.0}
    whole = undisturbed.post("/v1/chat/completions", body).json()
    texts, usage = streamed(undisturbed, "chat/completions", body)
    assert texts == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert len(set(texts.values())) == 3
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]
    ways = undisturbed.get(f"/admin/requests/{whole['id']}")
    assert ways["choices"] == [f"{whole['id']}.1", f"{whole['id']}.2"]
    followers = [undisturbed.get(f"/admin/requests/{id}") for id in ways["choices"]]
    assert all(one["cached_tokens"] >= 16 for one in followers), "they found the first one's prompt"


def test_two_prompts_with_two_answers_each(undisturbed: Service) -> None:
    fields = {"n": 2, "seed": 9, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    answer = undisturbed.post(
        "/v1/completions", completion(PROMPTS[0], **fields) | {"prompt": PROMPTS}
    ).json()
    alone = [undisturbed.post("/v1/completions", completion(prompt, **fields)).json() for prompt in PROMPTS]
    assert [choice["text"] for choice in answer["choices"]] == [
        choice["text"] for one in alone for choice in one["choices"]
    ]
    for count in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)
    assert answer["usage"]["completion_tokens"] == 4 * 8


def test_more_answers_than_anybody_waits_for(undisturbed: Service) -> None:
    """Eight long ones: when the client leaves, all of them end and every block comes back."""
    body = completion(PROMPTS[0], max_tokens=2000, ignore_eos=True, stream=True, temperature=1.0) | {"n": 8}
    seen: set[int] = set()
    with httpx.stream("POST", undisturbed.url + "/v1/completions", json=body, timeout=60) as answer:
        for event in events(answer.iter_lines()):
            seen.add(event["choices"][0]["index"])
            if len(seen) == 8:
                break
    assert undisturbed.until_idle() < 20
