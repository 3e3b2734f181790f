"""Which pages may call the service: none, unless a person says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from coordinator.door.cors import Cors
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
BODY = {"model": "smol", "prompt": "hi", "stream": True}


@contextlib.contextmanager
def open_to(tokenizer: Tokenizer, cors: Cors) -> Iterator[Served]:
    gateway = ScriptedGateway()
    gateway.answers(260)
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), api_keys=("k",), cors=cors)
    with serving(app, gateway) as served:
        yield served


@pytest.fixture(scope="module")
def off(tokenizer: Tokenizer) -> Iterator[Served]:
    with open_to(tokenizer, Cors()) as served:
        yield served


@pytest.fixture(scope="module")
def on(tokenizer: Tokenizer) -> Iterator[Served]:
    with open_to(tokenizer, Cors(origins=(PAGE,), credentials=True)) as served:
        yield served


def about_cors(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers if name.startswith("access-control-")]


def test_off_no_header_says_anything_of_it(off: Served) -> None:
    with httpx.Client(base_url=off.url, headers={"origin": PAGE}) as client:
        answers = [
            client.options("/v1/completions", headers=PREFLIGHT),
            client.get("/health"),
            client.get("/v1/models"),
            client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer k"}),
        ]
    assert [answer.status_code for answer in answers] == [401, 200, 401, 200]
    assert [about_cors(answer) for answer in answers] == [[], [], [], []]


def test_a_preflight_needs_no_key_and_a_request_does(on: Served) -> None:
    with httpx.Client(base_url=on.url, headers={"origin": PAGE}) as client:
        asked = client.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        # A page must be able to read why it was refused, and what it was answered, streams included.
        for key, status in (("wrong", 401), ("k", 200)):
            answer = client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_another_page_is_not_let_in(on: Served) -> None:
    with httpx.Client(base_url=on.url, headers={"origin": "https://evil.example.com"}) as client:
        asked = client.options("/v1/completions", headers=PREFLIGHT | {"origin": "https://evil.example.com"})
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers
        assert "access-control-allow-origin" not in client.get("/health").headers


def test_everybody_methods_and_headers(tokenizer: Tokenizer) -> None:
    cors = Cors(origins=("*",), methods=("GET",), headers=("x-mine",))
    with open_to(tokenizer, cors) as served, httpx.Client(base_url=served.url) as client:
        assert client.get("/health", headers={"origin": PAGE}).headers["access-control-allow-origin"] == "*"
        assert client.options("/health", headers=PREFLIGHT).status_code == 400
        mine = {
            "origin": PAGE,
            "access-control-request-method": "GET",
            "access-control-request-headers": "x-mine",
        }
        assert client.options("/health", headers=mine).status_code == 200
