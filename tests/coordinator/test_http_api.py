"""Shapes, statuses and routes, over a real uvicorn."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import httpx
import pytest

from common.errors import DeadlinePassed, KvferryError, NotAdmitted, NoWorker, RequestFailed
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Script, Served

CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "smol", "prompt": "hi"}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
SENTENCE = "Paris is 😀 nice, isn't it? 你好"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, which ends in [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def answers(served: Served, tokenizer: Tokenizer, text: str = SENTENCE, **how: Any) -> list[int]:
    ids = [*tokenizer.encode_now(text), 2]
    served.gateway.answers(*ids, finish="stop", **how)
    return ids


def test_a_whole_chat(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = answers(served, tokenizer, cached_tokens=16)
    body = client.post("/v1/chat/completions", json=CHAT).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "smol"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SENTENCE, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = served.gateway.requests[0].prompt_tokens
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "total_tokens": prompt + len(ids),
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert served.gateway.cancelled == []


def test_a_whole_text(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    answers(served, tokenizer)
    body = client.post("/v1/completions", json=TEXT).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": SENTENCE, "logprobs": None, "finish_reason": "stop"}]


def test_a_streamed_chat(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = answers(served, tokenizer)
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all(
        set(chunk) == {"id", "object", "created", "model", "service_tier", "system_fingerprint", "choices"}
        for chunk in chunks
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    contents = [choice["delta"]["content"] for choice in choices[1:-1]]
    assert "".join(contents) == SENTENCE
    assert all(contents)
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    # One chunk for each token, but where a character is split.
    assert len(contents) <= len(ids) - 1
    assert contents[:2] == ["Paris", " is"]


def test_a_streamed_text(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    answers(served, tokenizer)
    chunks = events(client.post("/v1/completions", json=TEXT | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SENTENCE
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("named", "served_by"), [("fast", "fast"), ("auto", "default"), (None, "default")])
def test_answers_and_chunks_say_which_tier_served_them(
    served: Served,
    client: httpx.Client,
    tokenizer: Tokenizer,
    route: str,
    named: str | None,
    served_by: str,
) -> None:
    answers(served, tokenizer)
    asked = ROUTES[route] | {"service_tier": named}
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    said = [client.post(route, json=asked).json(), *events(client.post(route, json=streamed))]
    assert {one["service_tier"] for one in said} == {served_by}


@pytest.mark.parametrize("route", ROUTES)
def test_usage_in_a_stream(served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str) -> None:
    answers(served, tokenizer, cached_tokens=4, group=3)
    whole = client.post(route, json=ROUTES[route]).json()["usage"]
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *before, last = events(client.post(route, json=ROUTES[route] | asked))
    assert (last["choices"], last["usage"]) == ([], whole)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    for options in ({"stream": True}, {"stream": True, "stream_options": {"include_usage": False}}):
        assert all("usage" not in chunk for chunk in events(client.post(route, json=ROUTES[route] | options)))


@pytest.mark.parametrize("group", [1, 2, 100])
def test_a_stream_is_its_whole(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, group: int
) -> None:
    """Text, log-probabilities and reason, over stops and split characters."""
    for text in (SENTENCE, "a😀", "x"):
        for stop in ([], ["isn"], ["😀"], ["n't i", "zzz"], ["好"], ["P"]):
            answers(served, tokenizer, text, group=group)
            asked: dict[str, Any] = {"stop": stop, "logprobs": True, "top_logprobs": 2}
            whole = client.post("/v1/chat/completions", json=CHAT | asked).json()["choices"][0]
            parts = events(client.post("/v1/chat/completions", json=CHAT | asked | {"stream": True}))
            choices = [part["choices"][0] for part in parts]
            assert (
                "".join(choice["delta"].get("content", "") for choice in choices)
                == whole["message"]["content"]
            )
            entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
            assert entries == whole["logprobs"]["content"]
            assert choices[-1]["finish_reason"] == whole["finish_reason"]

            asked = {"stop": stop, "logprobs": 1}
            one = client.post("/v1/completions", json=TEXT | asked).json()["choices"][0]
            many = [
                part["choices"][0]
                for part in events(client.post("/v1/completions", json=TEXT | asked | {"stream": True}))
            ]
            assert "".join(choice["text"] for choice in many) == one["text"] == whole["message"]["content"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [
                    value for choice in many if choice["logprobs"] for value in choice["logprobs"][name]
                ]
                assert joined == one["logprobs"][name]


def test_logprobs_of_a_chat(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = answers(served, tokenizer, "a 😀!")[:-1]
    asked = {"logprobs": True, "top_logprobs": 3}
    content = client.post("/v1/chat/completions", json=CHAT | asked).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [bytes(entry["bytes"]) for entry in content] == [tokenizer.token_bytes(id) for id in ids]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["token"].isprintable() for entry in content)
    content = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True}).json()["choices"][0][
        "logprobs"
    ]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_logprobs_of_a_text(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = answers(served, tokenizer, "go 😀!")[:-1]
    logprobs = client.post("/v1/completions", json=TEXT | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 2, 3, 4]
    assert logprobs["tokens"][0] == "go"
    assert logprobs["tokens"][1].startswith("bytes:\\x20\\xf0")
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]
    assert len(logprobs["tokens"]) == len(ids)
    served.gateway.answers(0, finish="length")  # its log-probability is minus infinity
    assert client.post("/v1/completions", json=TEXT | {"logprobs": 1}).json()["choices"][0]["logprobs"][
        "token_logprobs"
    ] == [-9999.0]


def test_a_stop_string_ends_the_work(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    answers(served, tokenizer)
    body = client.post("/v1/completions", json=TEXT | {"stop": " nice"}).json()
    assert body["choices"][0] == {
        "index": 0,
        "text": "Paris is 😀",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert len(served.gateway.stopped) == 1
    assert body["usage"]["completion_tokens"] == served.gateway.deltas_taken
    served.gateway.reset()
    answers(served, tokenizer, group=100)  # found in the last delta: nothing is left to stop
    client.post("/v1/completions", json=TEXT | {"stop": " nice"})
    assert served.gateway.stopped == []


def test_an_answer_without_text(served: Served, client: httpx.Client) -> None:
    served.gateway.answers(2, finish="stop")
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == ""


FAILURES: list[tuple[KvferryError, int, str, str]] = [
    (NotAdmitted("full", retry_after_s=1.2), 429, "rate_limit_error", "not_admitted"),
    (NoWorker("none left"), 503, "service_unavailable", "no_worker"),
    (NoWorker("none left", code="shutting_down"), 503, "service_unavailable", "shutting_down"),
    (DeadlinePassed("too late"), 408, "timeout_error", "deadline"),
    (RequestFailed("prefill failed", code="prefill"), 500, "server_error", "prefill"),
    (RequestFailed("it failed"), 500, "server_error", "request_failed"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["admission", "first token"])
@pytest.mark.parametrize(("error", "status", "kind", "code"), FAILURES)
def test_a_failure_before_the_first_token_has_its_status(
    served: Served,
    client: httpx.Client,
    route: str,
    stream: bool,
    when: str,
    error: KvferryError,
    status: int,
    kind: str,
    code: str,
) -> None:
    how = {"refuse": error} if when == "admission" else {"error": error}
    served.gateway.answers(5, **how)
    response = client.post(route, json=ROUTES[route] | {"stream": stream})
    assert response.status_code == status
    assert response.json() == {"error": {"message": error.message, "type": kind, "param": None, "code": code}}
    assert response.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "error", [RequestFailed("decode failed", code="decode"), RuntimeError("/secret/path")]
)
def test_a_failure_in_the_middle(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str, error: Exception
) -> None:
    answers(served, tokenizer, error=error, error_after=3)
    response = client.post(route, json=ROUTES[route] | {"stream": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    last = response.text.rstrip("\n").split("\n\n")[-1]
    event, data = last.split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "server_error"
    assert response.text.count("\n\n") >= 4  # what came before is there

    response = client.post(route, json=ROUTES[route])
    assert response.status_code == 500
    assert "secret" not in response.text


def test_a_bug_says_nothing_of_the_inside(served: Served, client: httpx.Client) -> None:
    served.gateway.answers(5, error=RuntimeError("/secret/path"))
    response = client.post("/v1/completions", json=TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text

    def broken(_: object) -> Script:
        raise KeyError("/secret/path")

    served.gateway.script = broken
    response = client.post("/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 500
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1/completions/", "/admin", "/", "/redoc", "/docs/oauth2-redirect"]
)
def test_no_such_route(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "route_not_found"


def test_the_wrong_method(client: httpx.Client) -> None:
    for method, path in (("GET", "/v1/completions"), ("POST", "/health"), ("DELETE", "/v1/models")):
        response = client.request(method, path)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/version", "/v1/models", "/v1/models/smol", "/docs"]
)
def test_a_probe_with_head_is_answered_as_get_without_a_body(client: httpx.Client, path: str) -> None:
    with_body, without = client.get(path), client.head(path)
    assert (without.status_code, without.content) == (200, b"")
    assert without.headers["content-type"] == with_body.headers["content-type"]


def test_a_probe_with_head_sees_what_is_wrong(served: Served, client: httpx.Client) -> None:
    served.gateway.unhealthy = "no live decode worker"
    assert (client.head("/health").status_code, client.head("/nope").status_code) == (503, 404)
    assert client.head("/v1/completions").headers["allow"] == "POST"
    assert client.get("/version").status_code == 200, "the connection is in order after each"


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["smol", "alias"]
    assert listed["data"][0]["max_model_len"] == 8192
    assert client.get("/v1/models/alias").json()["id"] == "alias"
    assert client.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_health_version_and_admin(served: Served, client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    served.gateway.unhealthy = "no live decode worker"
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no live decode worker"
    assert response.headers["retry-after"] == "1"
    assert client.get("/version").json()["version"]
    assert client.get("/admin/workers").json() == served.gateway.workers()
    assert client.get("/admin/requests/known").json() == {"id": "known"}
    assert client.get("/admin/requests/other").status_code == 404


def test_metrics_count_what_happened(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    def scrape() -> dict[str, float]:
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = scrape()
    ids = answers(served, tokenizer)
    client.post("/v1/completions", json=TEXT | {"service_tier": "fast"})
    client.post("/v1/completions", json=TEXT | {"service_tier": "fast", "stream": True})
    client.post("/v1/completions", json=TEXT | {"model": "x"})
    after = scrape()
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert grown['kvferry_request_success_total{finished_reason="stop"}'] == 2
    assert grown['kvferry_generation_tokens_total{tier="fast"}'] == 2 * len(ids)
    assert grown['kvferry_prompt_tokens_total{tier="fast"}'] == 2 * served.gateway.requests[0].prompt_tokens
    assert grown['kvferry_time_to_first_token_seconds_count{tier="fast"}'] == 2
    assert grown['kvferry_e2e_request_latency_seconds_count{tier="fast"}'] == 2
    assert grown['kvferry_handover_gap_seconds_count{tier="fast"}'] == 2
    assert grown['kvferry_requests_rejected_total{reason="model_not_found"}'] == 1
    assert not any('tier="default"' in name for name in grown)


def test_the_log_has_a_line_and_no_content(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    answers(served, tokenizer, "SECRET-ANSWER")
    with caplog.at_level(logging.INFO, "kvferry.http"):
        id = client.post("/v1/completions", json=TEXT | {"prompt": "SECRET-PROMPT"}).json()["id"]
        client.get("/health")  # the line is written after the answer
    lines = [record.getMessage() for record in caplog.records if id in record.getMessage()]
    assert len(lines) == 1
    assert "SECRET" not in caplog.text
    assert "200 stop" in lines[0]


@pytest.mark.parametrize(
    ("route", "change", "refuse", "says"),
    [
        ("/v1/chat/completions", {"model": "x"}, None, "chat - 404 rejected code=model_not_found"),
        ("/v1/completions", {"frob": 1}, None, "text - 422 rejected code=unknown_field"),
        ("/v1/completions", {}, NoWorker("none"), "503 rejected code=no_worker"),
    ],
)
def test_a_rejection_is_logged_with_its_code_and_the_clients_id(
    served: Served,
    client: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    route: str,
    change: dict[str, Any],
    refuse: KvferryError | None,
    says: str,
) -> None:
    served.gateway.answers(5, refuse=refuse)
    with caplog.at_level(logging.INFO, "kvferry.http"):
        client.post(route, json=ROUTES[route] | change, headers={"x-request-id": "mine"})
        client.get("/health")
    (line,) = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert says in line
    assert "client_id='mine'" in line


def test_a_failure_is_logged_with_its_code(
    served: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    served.gateway.answers(5, 6, error=NoWorker("stopping", code="shutting_down"), error_after=1)
    with caplog.at_level(logging.INFO, "kvferry.http"):
        text = client.post("/v1/completions", json=TEXT | {"stream": True}).text
        client.get("/health")
    assert '"code": "shutting_down"' in text
    assert "503 error code=shutting_down client_id=''" in caplog.text


def test_what_is_not_http_gets_400_and_no_line(
    served: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.settimeout(5)
            connection.sendall(b"not http at all\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        client.get("/health")
    assert "Invalid HTTP" not in caplog.text
