"""The document and its page: every field and route is there, and what the server answers is as they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from common.errors import KvferryError, NotAdmitted, NoWorker
from common.messages import Ended
from common.request import RequestId
from coordinator.docs.openapi import ROUTES, Facts, document
from coordinator.docs.page import page
from coordinator.door.front_door import FrontDoor
from coordinator.http_api import create_app
from coordinator.openai.fields import Fields
from coordinator.tokenizer import Tokenizer
from tests.coordinator.cluster_bench import ClusterBench
from tests.coordinator.schema_bodies import validator
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

BODIES = [route.body for route in ROUTES if route.body is not None]
FACTS = Facts(("smol", "a<b>&'\"/c"), ("default", "fast"), 49152, 8192, 1 << 20, 1.0, False)
SAID = document(FACTS)
KEYED = document(Facts(("smol",), ("default",), 49152, None, 1 << 20, 1.0, True))
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "smol",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {"model": "smol", "prompt": "hi", "logprobs": 2},
}
SENTENCE = "Paris is 😀 nice"


def schemas_of(body: type[Fields]) -> dict[str, Any]:
    """Name → schema of the body and of each object in it."""
    schema = body.model_json_schema()
    return {**schema.pop("$defs", {}), body.__name__: schema}


def operation(path: str, method: str = "get") -> dict[str, Any]:
    found: dict[str, Any] = SAID["paths"][path][method]
    return found


def check(answer: Any, name: str) -> None:
    """An answer is as the schema of this name says: nothing missing, nothing more."""
    wrong = [
        f"{list(error.absolute_path)}: {error.message}" for error in validator(SAID, name).iter_errors(answer)
    ]
    assert wrong == [], "coordinator/docs/answers.py says otherwise"


def every(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for inside in value.values():
            yield from every(inside, key)
    elif isinstance(value, list):
        for inside in value:
            yield from every(inside, key)


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("body", BODIES)
def test_each_field_is_described(body: type[Fields]) -> None:
    """A field without a line: add one to `coordinator/openai/field_words.py`."""
    silent = [
        f"{name}.{field}"
        for name, schema in schemas_of(body).items()
        for field, said in schema.get("properties", {}).items()
        if not said.get("description")
    ]
    assert silent == []
    assert [name for name, schema in schemas_of(body).items() if not schema["description"]] == []


@pytest.mark.parametrize("body", BODIES)
def test_each_field_that_we_know_is_there(body: type[Fields]) -> None:
    properties = SAID["components"]["schemas"][body.__name__]["properties"]
    assert set(properties) == set(body.model_fields) | set(body.NEUTRAL)
    for name, values in body.NEUTRAL.items():
        assert properties[name]["enum"] == [*values, None]


def test_what_depends_on_the_server_is_narrowed() -> None:
    chat = SAID["components"]["schemas"]["ChatFields"]["properties"]
    assert chat["model"]["enum"] == list(FACTS.served_models)
    assert chat["service_tier"]["enum"] == ["auto", "default", "fast", None]
    assert chat["max_tokens"]["maximum"] == 8191
    assert chat["stop_token_ids"]["items"]["maximum"] == 49151
    without_workers = KEYED["components"]["schemas"]["ChatFields"]["properties"]
    assert "maximum" not in without_workers["max_tokens"]


def test_defaults_are_said() -> None:
    text = SAID["components"]["schemas"]["TextFields"]["properties"]
    assert (text["temperature"]["default"], text["stop"]["default"], text["logit_bias"]["default"]) == (
        1.0,
        [],
        {},
    )
    assert "default" not in text["seed"] and "default" not in text["model"]


# ---------------------------------------------------------------- the document itself


def test_routes_are_those_of_the_server(tokenizer: Tokenizer) -> None:
    gateway = ScriptedGateway()
    door = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",))
    assert isinstance(door, FrontDoor) and isinstance(door._app, FastAPI)
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in door._app.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) - {"HEAD"}  # goes with GET
    }
    assert {(method, path) for path, item in SAID["paths"].items() for method in item} == served


def test_it_is_a_sound_document() -> None:
    for said in (SAID, KEYED):
        assert json.loads(json.dumps(said)) == said
        for schema in said["components"]["schemas"].values():
            Draft202012Validator.check_schema(schema)
        for ref in every(said, "$ref"):
            place = said
            for step in ref.removeprefix("#/").split("/"):
                place = place[step]
        ids = [each["operationId"] for item in said["paths"].values() for each in item.values()]
        assert len(ids) == len(set(ids)) == len(ROUTES)
        assert {link["timeline"]["operationId"] for link in every(said["paths"], "links")} < set(ids)
        for name, schema in said["components"]["schemas"].items():
            for field, each in schema.get("properties", {}).items():
                assert each.get("description") or "$ref" in each, f"{name}.{field} is not described"
    assert len(set(every(SAID, "$ref"))) > 30


def test_examples_are_what_their_schema_takes() -> None:
    for route in ROUTES:
        if route.body is not None:
            content = operation(route.path, route.method)["requestBody"]["content"]["application/json"]
            assert validator(SAID, route.body.__name__).is_valid(content["example"])


def test_keys_are_asked_for_where_they_are_set() -> None:
    assert KEYED["security"] == [{"key": []}] and "security" not in SAID
    assert KEYED["paths"]["/health"]["get"]["security"] == []
    assert "401" in KEYED["paths"]["/v1/models"]["get"]["responses"]
    assert "401" not in KEYED["paths"]["/health"]["get"]["responses"]
    assert "401" not in operation("/v1/models")["responses"]


# ---------------------------------------------------------------- what is answered


def answers(served: Served, tokenizer: Tokenizer) -> None:
    served.gateway.answers(*tokenizer.encode_now(SENTENCE), 2, finish="stop")


@pytest.mark.parametrize(
    ("path", "whole", "chunk"),
    [
        ("/v1/chat/completions", "ChatAnswer", "ChatChunk"),
        ("/v1/completions", "TextAnswer", "TextChunk"),
    ],
)
def test_completions_are_as_described(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, path: str, whole: str, chunk: str
) -> None:
    answers(served, tokenizer)
    plain = {name: value for name, value in ASKED[path].items() if "logprobs" not in name}
    wordy = {"n": 2} if "chat" in path else {"n": 2, "prompt": ["hi", "ho"], "echo": True}
    for asked in (ASKED[path], plain, ASKED[path] | wordy, plain | wordy):
        check(client.post(path, json=asked).json(), whole)
        for options in ({}, {"stream_options": {"include_usage": True}}):
            events = client.post(path, json=asked | {"stream": True} | options).text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""] and len(events) > 5
            for event in events[:-2]:
                check(json.loads(event.removeprefix("data: ")), chunk)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", "Models"),
        ("/v1/models/smol", "Model"),
        ("/health", "Health"),
        ("/version", "Version"),
    ],
)
def test_what_answers_at_once_is_as_described(client: httpx.Client, path: str, name: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    check(answer.json(), name)


def test_what_operators_see_is_as_described() -> None:
    bench = ClusterBench("p0", "d0")
    key, prefill, _ = bench.decoding(tokens_out=3)
    bench.say(prefill, Ended(*key, outcome="handed_over", blocks=2, durations_s={"prefilling": 0.5}))
    timeline = bench.cluster.timeline(RequestId("a"), 9.0)
    assert timeline is not None and timeline["workers"]
    check(json.loads(json.dumps(timeline)), "Timeline")
    rows = bench.cluster.registry.rows()
    assert len(rows) == 2
    for row in rows:
        check(json.loads(json.dumps(row)), "WorkerRow")


def test_errors_are_as_described(served: Served, client: httpx.Client) -> None:
    path = "/v1/chat/completions"
    said = operation(path, "post")["responses"]
    refusals: list[tuple[Any, KvferryError | None]] = [
        ({"model": "smol"}, None),
        (ASKED[path] | {"model": "other"}, None),
        (ASKED[path] | {"unknown": 1}, None),
        (ASKED[path] | {"user": "x" * (1 << 21)}, None),
        (ASKED[path], NotAdmitted("Full.", retry_after_s=2.0)),
        (ASKED[path], NoWorker("Nobody.")),
        (ASKED[path], KvferryError("Ours.")),
    ]
    met = set()
    for body, refuse in refusals:
        served.gateway.answers(1, refuse=refuse)
        answer = client.post(path, json=body)
        check(answer.json(), "ErrorAnswer")
        met.add(str(answer.status_code))
        named = said[str(answer.status_code)]["$ref"].rsplit("/", 1)[1]
        for header, about in SAID["components"]["responses"][named]["headers"].items():
            assert header in answer.headers or not about.get("required")
    assert met == set(said) - {"200", "408"}


# ---------------------------------------------------------------- served


class Page(HTMLParser):
    """Tags that are open, all text, and every address that the page leads to."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        told = dict(attrs)
        assert not told.keys() & {"src", "onclick", "onload"}
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("said", [SAID, KEYED])
def test_the_page_holds_all_of_it_and_needs_nothing_else(said: dict[str, Any]) -> None:
    html = page(said)
    read = Page()
    read.feed(html)
    assert read.open == [] and not read.tags & {"script", "link", "img", "iframe"}
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert len(read.ids) == len(set(read.ids))
    assert "http" not in html.replace("http://127.0.0.1:8000", "")
    for schema in said["components"]["schemas"].values():
        for field, about in schema.get("properties", {}).items():
            assert field in read.text and about.get("description", "") in read.text
    for path in said["paths"]:
        assert path in read.text
    assert ("Bearer $KEY" in read.text) == ("security" in said)
    for told in (
        "integer (0 to 20) or null",
        "number (more than 0, at most 1) or null",
        "StreamOptions or null",
    ):
        assert told in read.text


def test_both_are_served(client: httpx.Client, served: Served) -> None:
    said = client.get("/openapi.json").json()
    assert said["openapi"] == "3.1.0"
    assert said["components"]["schemas"]["TextFields"]["properties"]["model"]["enum"] == ["smol", "alias"]
    shown = client.get("/docs")
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert shown.text == page(said)
    served.gateway.context = 100
    assert client.get("/openapi.json").json() != said, "it tells of now"


def test_both_need_a_key_where_keys_are_set(tokenizer: Tokenizer) -> None:
    gateway = ScriptedGateway()
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), api_keys=("secret",))
    with serving(app, gateway) as served, httpx.Client(base_url=served.url) as client:
        for path in ("/openapi.json", "/docs"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
        said = client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        assert said["security"] and not re.search("secret", json.dumps(said))
