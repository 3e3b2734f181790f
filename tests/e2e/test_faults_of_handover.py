"""Aborts and first tokens over HTTP, on one real service: groups A and E of the faults that users have met.

Most of both is told in virtual time (`tests/bench/test_faults_of_*.py`); here is what needs HTTP or a real model.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.service import HEARTBEAT_S, Service, completion, events


def test_BR_011_one_request_and_then_nothing(undisturbed: Service, text_ids: list[int]) -> None:
    """Nobody else comes who would wake the workers: with the next heartbeat every block is back."""
    undisturbed.until_idle()
    undisturbed.complete(text_ids[900:1000], max_tokens=3, ignore_eos=True)
    assert undisturbed.until_idle() < HEARTBEAT_S + 0.5


@pytest.mark.parametrize("fields", [{"n": 4}, {"prompt": ["One", "Two", "Three", "Four"]}])
def test_BR_012_whoever_asked_for_four_answers_leaves(undisturbed: Service, fields: dict[str, Any]) -> None:
    body = completion("Once", max_tokens=3000, ignore_eos=True, temperature=1, seed=1, stream=True) | fields
    with (
        httpx.Client(verify=False, trust_env=False, timeout=60) as client,
        client.stream("POST", undisturbed.url + "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        next(answer.iter_lines())
    step_s = max(row["step_ms"] for row in undisturbed.workers()) / 1e3
    assert undisturbed.until_idle() < 3 * (step_s + 0.3 + HEARTBEAT_S)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_BR_072_as_many_tokens_as_were_asked_for(
    undisturbed: Service, text_ids: list[int], max_tokens: int
) -> None:
    """Streamed and whole; for one token the decode worker is not met."""
    moved = undisturbed.counted("kv_transfer_bytes_total")
    body = completion(
        text_ids[40 * max_tokens : 40 * max_tokens + 33], max_tokens=max_tokens, ignore_eos=True
    )
    whole = undisturbed.post("/v1/completions", body).json()
    counting = body | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(iter(undisturbed.post("/v1/completions", counting).text.splitlines()))
    assert whole["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == max_tokens
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert (undisturbed.counted("kv_transfer_bytes_total") > moved) == (max_tokens > 1)


def test_BR_074_a_stop_string_at_the_twentieth_token(undisturbed: Service) -> None:
    """No token is dropped or said twice at either end: with and without the stop, streamed and whole."""
    body = completion("One, two, three,", max_tokens=20, ignore_eos=True, logprobs=0)
    free = undisturbed.post("/v1/completions", body).json()["choices"][0]
    tokens = free["logprobs"]["tokens"]
    assert len(tokens) == 20 and "".join(tokens) == free["text"]
    stop = "".join(tokens[-2:])
    kept = free["text"][: free["text"].index(stop)]
    stopped = undisturbed.post("/v1/completions", body | {"stop": [stop]}).json()["choices"][0]
    for fields, whole, text in (({}, free, free["text"]), ({"stop": [stop]}, stopped, kept)):
        stream = undisturbed.post("/v1/completions", body | fields | {"stream": True}).text
        choices = [event["choices"][0] for event in events(iter(stream.splitlines()))]
        assert "".join(choice["text"] for choice in choices) == whole["text"] == text
        said = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert said == whole["logprobs"]["tokens"]


def test_BR_076_the_first_token_has_its_log_probability(undisturbed: Service, text_ids: list[int]) -> None:
    """One for each token, in both surfaces, streamed too; the prefill worker's is what the decode worker would say."""
    prompt = text_ids[1500:1540]
    whole = undisturbed.complete(prompt, max_tokens=5, logprobs=1, ignore_eos=True)
    values = whole["logprobs"]["token_logprobs"]
    assert len(values) == len(whole["logprobs"]["tokens"]) == 5 and all(value <= 0 for value in values)
    alone = undisturbed.complete(prompt, max_tokens=1, logprobs=1, ignore_eos=True)
    assert alone["logprobs"]["token_logprobs"] == values[:1]
    body = completion(prompt, max_tokens=5, logprobs=1, ignore_eos=True, stream=True)
    chunks = events(iter(undisturbed.post("/v1/completions", body).text.splitlines()))
    streamed = [v for c in chunks if (said := c["choices"][0]["logprobs"]) for v in said["token_logprobs"]]
    assert streamed == values


def test_the_timeline_of_whoever_left_is_kept(undisturbed: Service, text_ids: list[int]) -> None:
    """By the id of the stream; how many are kept is said to whoever asks for one that is not."""
    body = completion(text_ids[60:160], max_tokens=3000, ignore_eos=True, stream=True)
    asked_at = time.monotonic()
    with (
        httpx.Client(verify=False, trust_env=False, timeout=60) as client,
        client.stream("POST", undisturbed.url + "/v1/completions", json=body) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        heard = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
    undisturbed.until_idle()
    found = undisturbed.get(f"/admin/requests/{heard[0]['id']}")
    assert (found["phase"], found["attempts"]) == ("aborted", 1) and found["output_tokens"] >= 3
    assert {part["worker"]: part["outcome"] for part in found["workers"]} == {
        "prefill-0": "handed_over",
        "decode-0": "aborted",
    }
    assert sum(found["coordinator_seconds"].values()) == pytest.approx(found["seconds"], abs=1e-4)
    assert 0 < found["seconds"] < time.monotonic() - asked_at and found["transferred_bytes"] > 0
    missing = httpx.get(undisturbed.url + "/admin/requests/nobody", verify=False)
    assert missing.status_code == 404 and "1024" in missing.json()["error"]["message"]
