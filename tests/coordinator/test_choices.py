"""Several answers to one request, over real HTTP: indices, texts, usage, reasons, log-probabilities, ends."""

from __future__ import annotations

import itertools
import time
from typing import Any

import httpx
import pytest

from common.errors import RequestFailed
from common.request import Request, unpack_ids
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Script, Served
from tests.coordinator.test_generation import eventually, metric, raw, read_until
from tests.coordinator.test_http_api import CHAT, TEXT, events

TEXTS = ("one two three", "four 😀", "five six seven eight nine", "")
END = 2


def script_of(tokenizer: Tokenizer, scored: bool = False) -> Any:
    """Each choice has a text of its own, of another length; the last one ends at once. Reasons take turns."""
    counter = itertools.count()

    def script(_: Request) -> Script:
        place = next(counter) % len(TEXTS)
        ids = tokenizer.encode_now(TEXTS[place]) if TEXTS[place] else []
        if place % 2:
            return Script([*ids, END], "stop", cached_tokens=7 + place)
        return Script(ids, "length", cached_tokens=7 + place)

    return script


def whole_texts(path: str, body: dict[str, Any]) -> list[tuple[int, str, str]]:
    show = (lambda c: c["message"]["content"]) if "chat" in path else (lambda c: c["text"])
    return [(choice["index"], show(choice), choice["finish_reason"]) for choice in body["choices"]]


def streamed_texts(path: str, chunks: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Joined by index; asserts that only the first and last chunk of a choice may have no text."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "a chunk after the last one"
            text = choice["delta"].get("content") if "chat" in path else choice["text"]
            role = "chat" in path and "role" in choice["delta"]
            assert role == ("chat" in path and index not in texts), "the role comes first and once"
            assert text or role or choice["finish_reason"], "a chunk that says nothing"
            texts[index] = texts.get(index, "") + (text or "")
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return [(index, texts[index], reasons[index]) for index in sorted(texts)]


WANTED = [(0, TEXTS[0], "length"), (1, TEXTS[1], "stop"), (2, TEXTS[2], "length"), (3, TEXTS[3], "stop")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_whole_and_streamed_are_the_same(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, path: str
) -> None:
    """BR-115: usage too, however it is sent."""
    body = (CHAT if "chat" in path else TEXT) | {"n": 4, "seed": 5}
    served.gateway.script = script_of(tokenizer)
    whole = client.post(path, json=body).json()
    assert whole_texts(path, whole) == WANTED
    requests = list(served.gateway.requests)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    served.gateway.script = script_of(tokenizer)
    chunks = events(client.post(path, json=body | options))
    assert streamed_texts(path, chunks) == WANTED
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    served.gateway.script = script_of(tokenizer)
    assert all("usage" not in chunk for chunk in events(client.post(path, json=body | {"stream": True})))
    prompt = requests[0].prompt_tokens
    made = sum(len(tokenizer.encode_now(text)) if text else 0 for text in TEXTS) + 2
    assert whole["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": 7
        },  # of the leader; what the others find was computed for them
    }
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["system_fingerprint"] for chunk in [*chunks, whole]} == {"fp_0123456789"}


def test_what_the_cluster_is_asked(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    served.gateway.script = script_of(tokenizer)
    body = client.post("/v1/completions", json=TEXT | {"prompt": [[5, 6], [7, 8, 9]], "n": 3}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    asked = served.gateway.requests
    main = body["id"]
    assert [r.request_id for r in asked] == [main, *(f"{main}.{place}" for place in range(1, 6))]
    assert [r.sampling.child for r in asked] == [0, 1, 2] * 2
    assert [r.leader for r in asked] == [main] * 3 + [f"{main}.3"] * 3
    assert [r.follows for r in asked] == [False, True, True] * 2
    assert [unpack_ids(r.prompt_ids) for r in asked] == [[5, 6]] * 3 + [[7, 8, 9]] * 3
    assert len({r.sampling.seed for r in asked[:3]}) == 1 and asked[0].sampling.seed != asked[3].sampling.seed
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 7 + 7 + 3, "of both leaders"
    assert body["choices"][4]["text"] == TEXTS[0]
    served.gateway.requests.clear()
    client.post("/v1/completions", json=TEXT | {"n": 1})
    assert [r.leader for r in served.gateway.requests] == [""]
    served.gateway.requests.clear()
    client.post("/v1/completions", json=TEXT | {"prompt": ["a", "b c"], "seed": 3})
    assert [(r.leader, r.sampling.seed, r.sampling.child) for r in served.gateway.requests] == [
        ("", 3, 0)
    ] * 2


def test_each_prompt_has_its_own_room(served: Served, client: httpx.Client) -> None:
    served.gateway.context = 100
    served.gateway.answers(260)
    prompts = [[5] * 95, [5] * 10]
    client.post("/v1/completions", json=TEXT | {"prompt": prompts})
    assert [r.sampling.max_tokens for r in served.gateway.requests] == [5, 16]
    for changes, why in (
        ({"prompt": [[5], [5] * 100]}, "prompt[1]: has 100 tokens"),
        ({"prompt": prompts, "max_tokens": 6}, "max_tokens: the prompt has 95 tokens"),
        ({"prompt": ["a", ""]}, "prompt[1]: is empty"),
        ({"prompt": [[1], [5, 10**6]]}, "prompt[1][1]: is not a token id"),
        ({"prompt": ["a"] * 65, "n": 2}, "n: 65 prompts with n = 2 are more than 128"),
    ):
        response = client.post("/v1/completions", json=TEXT | changes)
        error = response.json()["error"]
        assert (response.status_code, error["message"][: len(why)]) == (400, why)
        assert error["param"] == why.split(":")[0].split("[")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_choice_only(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, stream: bool
) -> None:
    served.gateway.script = script_of(tokenizer)
    body = TEXT | {"n": 4, "stop": "six", "stream": stream}
    response = client.post("/v1/completions", json=body)
    found = (
        streamed_texts("", events(response)) if stream else whole_texts("/v1/completions", response.json())
    )
    assert found == [*WANTED[:2], (2, "five ", "stop"), WANTED[3]]
    main = served.gateway.requests[0].request_id
    assert served.gateway.stopped == [f"{main}.2"] and served.gateway.cancelled == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_log_probabilities_are_of_their_choice(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, path: str
) -> None:
    asked = {"logprobs": True} if "chat" in path else {"logprobs": 1}
    body = (CHAT if "chat" in path else TEXT) | asked | {"n": 3}

    def names(logprobs: dict[str, Any]) -> list[str]:
        return [e["token"] for e in logprobs["content"]] if "chat" in path else logprobs["tokens"]

    served.gateway.script = script_of(tokenizer)
    whole = [names(choice["logprobs"]) for choice in client.post(path, json=body).json()["choices"]]
    served.gateway.script = script_of(tokenizer)
    streamed: list[list[str]] = [[], [], []]
    for chunk in events(client.post(path, json=body | {"stream": True})):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += names(choice["logprobs"]) if choice["logprobs"] else []
    assert streamed == whole
    assert ["".join(tokens) for tokens in (whole[0], whole[2])] == [TEXTS[0], TEXTS[2]]


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_fails_the_request(served: Served, client: httpx.Client, stream: bool) -> None:
    scripts = iter(
        [
            Script([260] * 9),
            Script([260] * 3, error=RequestFailed("decode failed"), error_after=2),
            Script([260]),
        ]
    )
    served.gateway.script = lambda _: next(scripts)
    response = client.post("/v1/completions", json=TEXT | {"n": 3, "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert "decode failed" in response.text and "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_of_it(served: Served, stream: bool) -> None:
    served.gateway.answers(*[260] * 5000, gap_s=0.005)
    ended = metric(served, 'kvferry_request_success_total{finished_reason="abort"}')
    connection = raw(served, TEXT | {"n": 8, "stream": stream, "max_tokens": 5000})
    eventually(lambda: served.gateway.deltas_taken)
    if stream:
        read_until(connection, b'"index":7')
    connection.close()
    eventually(lambda: served.gateway.cancelled)
    time.sleep(0.05)
    (cancelled,) = served.gateway.cancelled
    assert cancelled[0] == served.gateway.requests[0].request_id
    eventually(lambda: metric(served, 'kvferry_request_success_total{finished_reason="abort"}') == ended + 1)


def values(client: httpx.Client) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines()]
    return {name: float(value) for name, value in lines if name[0] != "#"}


def test_measured_once_for_the_request_and_gaps_for_each_choice(served: Served, client: httpx.Client) -> None:
    """Three tokens for each of four choices: one first token, four times two gaps."""
    names = {
        'kvferry_time_to_first_token_seconds_count{tier="default"}': 1,
        'kvferry_inter_token_latency_seconds_count{tier="default"}': 8,
        'kvferry_handover_gap_seconds_count{tier="default"}': 4,
        'kvferry_request_time_per_output_token_seconds_count{tier="default"}': 1,
        'kvferry_e2e_request_latency_seconds_count{tier="default"}': 1,
        'kvferry_generation_tokens_total{tier="default"}': 12,
        'kvferry_prompt_tokens_total{tier="default"}': 3,
        'kvferry_request_success_total{finished_reason="length"}': 1,
    }
    for stream in (False, True):
        served.gateway.answers(260, 260, 260)
        before = values(client)
        client.post("/v1/completions", json=TEXT | {"prompt": [5, 6, 7], "n": 4, "stream": stream})
        after = values(client)
        grown = {name: after[name] - before[name] for name in names}
        assert grown == names, stream
