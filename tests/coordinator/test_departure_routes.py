"""The two routes that have a worker leave, to drain it or to change its role: bodies, refusals, who may ask."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from coordinator.door.cors import Cors
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

DRAIN, ROLE = "/admin/workers/decode-0/drain", "/admin/workers/decode-0/role"
NEEDED: dict[str, dict[str, Any]] = {DRAIN: {}, ROLE: {"role": "prefill"}}
"""What a body of each must say."""
BOTH = pytest.mark.parametrize("path", NEEDED)


def asked(served: Served) -> list[tuple[Any, ...]]:
    return [*served.gateway.drained, *served.gateway.changed]


@pytest.mark.parametrize(
    ("more", "deadline_s"), [({}, 30.0), ({"deadline_s": None}, 30.0), ({"deadline_s": 2}, 2.0)]
)
@BOTH
def test_the_answer_is_the_workers_row(
    served: Served, client: httpx.Client, path: str, more: dict[str, Any], deadline_s: float
) -> None:
    becomes = NEEDED[path].get("role")
    for _ in range(2):
        answer = client.post(path, json=NEEDED[path] | more)
        assert answer.status_code == 202
        assert answer.json() == {"id": "decode-0", "role": "decode", "becomes": becomes, "state": "draining"}
    wanted = ("decode-0", deadline_s) if path == DRAIN else ("decode-0", becomes, deadline_s)
    assert asked(served) == [wanted] * 2


def test_a_drain_needs_no_body(served: Served, client: httpx.Client) -> None:
    assert client.post(DRAIN, content=b"").status_code == 202
    assert asked(served) == [("decode-0", 30.0)]


def test_the_role_that_it_has_is_nothing_to_be_done(served: Served, client: httpx.Client) -> None:
    answer = client.post(ROLE, json={"role": "decode"})
    assert (answer.status_code, answer.json()["becomes"]) == (200, None)
    assert asked(served) == []


def refused(client: httpx.Client, path: str, content: bytes) -> tuple[int, str | None]:
    answer = client.post(path, content=content)
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("field", "status", "param"),
    [
        (b'"deadline_s": -1', 400, "deadline_s"),
        (b'"deadline_s": 3601', 400, "deadline_s"),
        (b'"deadline_s": 1e309', 400, "deadline_s"),
        (b'"deadline_s": "1"', 400, "deadline_s"),
        (b'"deadline_s": true', 400, "deadline_s"),
        (b'"deadline": 1', 422, "deadline"),
        (b'"deadline_s": 1, "deadline_s": 2', 400, None),
    ],
)
@BOTH
def test_a_bad_deadline_asks_nobody_to_leave(
    served: Served, client: httpx.Client, path: str, field: bytes, status: int, param: str | None
) -> None:
    needed = json.dumps(NEEDED[path]).encode()[1:-1]
    content = b"{" + b", ".join(part for part in (needed, field) if part) + b"}"
    assert refused(client, path, content) == (status, param)
    assert asked(served) == []


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (DRAIN, b"[]", None),
        (DRAIN, b"{", None),
        (ROLE, b"[]", None),
        (ROLE, b"", None),
        (ROLE, b"{}", "role"),
        (ROLE, b'{"role": null}', "role"),
        (ROLE, b'{"role": "coordinator"}', "role"),
        (ROLE, b'{"role": "Prefill"}', "role"),
        (ROLE, b'{"role": 1}', "role"),
        (ROLE, b'{"role": "prefill", "role": "decode"}', None),
    ],
)
def test_a_body_that_is_none_asks_nobody_to_leave(
    served: Served, client: httpx.Client, path: str, content: bytes, param: str | None
) -> None:
    assert refused(client, path, content) == (400, param)
    assert asked(served) == []


@BOTH
def test_an_unknown_worker(client: httpx.Client, path: str) -> None:
    answer = client.post(path.replace("decode-0", "nobody"), json=NEEDED[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "worker_not_found")
    answer = client.post(path.replace("decode-0", "%00"), json=NEEDED[path])
    assert answer.json()["error"]["message"] == r"No worker '\x00' is here.", "escaped once"


def test_what_the_cluster_refuses_is_a_409(served: Served, client: httpx.Client) -> None:
    served.gateway.conflict = "Worker decode-0 is the only decode worker that takes requests."
    answer = client.post(ROLE, json={"role": "prefill"})
    assert answer.status_code == 409
    assert answer.json()["error"] == {
        "message": served.gateway.conflict,
        "type": "invalid_request_error",
        "param": None,
        "code": "last_decode_worker",
    }


@BOTH
def test_a_key_is_asked_for_where_there_is_one(tokenizer: Tokenizer, path: str) -> None:
    gateway = ScriptedGateway()
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), api_keys=("secret",))
    body, key = NEEDED[path], {"authorization": "Bearer secret"}
    with serving(app, gateway) as served, httpx.Client(base_url=served.url, verify=False) as client:
        assert client.post(path, json=body).status_code == 401
        page = key | {"origin": "https://evil.example"}
        assert client.post(path, json=body, headers=page).status_code == 403
        assert asked(served) == []
        assert client.post(path, json=body, headers=key).status_code == 202


# ---------------------------------------------------------------- from web pages


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"},
        {"origin": "https://{host}"},
        {"origin": "http://{host}.evil.example"},
    ],
)
@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_no_page_of_another_origin_has_a_worker_leave(
    served: Served, client: httpx.Client, headers: dict[str, str], content_type: str
) -> None:
    """Nor does a path that leads nowhere say more to it."""
    host = served.url.removeprefix("http://")
    sent = {name: value.format(host=host) for name, value in headers.items()} | {"content-type": content_type}
    for path in (DRAIN, ROLE, "/admin/workers/nobody/drain", "/admin/nothing"):
        answer = client.post(path, json=NEEDED.get(path, {}), headers=sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
    assert asked(served) == []
    assert client.get("/admin/workers", headers=sent).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://{host}"},
        {"origin": "http://{host}", "sec-fetch-site": "same-origin"},
        {"origin": "https://{host}", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
def test_programs_and_our_own_page_may(served: Served, client: httpx.Client, headers: dict[str, str]) -> None:
    """Over https too, where a proxy before us ends it."""
    host = served.url.removeprefix("http://")
    sent = {name: value.format(host=host) for name, value in headers.items()}
    assert client.post(DRAIN, headers=sent).status_code == 202


@pytest.mark.parametrize("allowed", ["https://ops.example", "*"])
def test_a_page_that_is_named_may(tokenizer: Tokenizer, allowed: str) -> None:
    gateway = ScriptedGateway()
    cors = Cors(origins=(allowed,))
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), cors=cors)
    sent = {"origin": "https://ops.example", "sec-fetch-site": "cross-site"}
    with serving(app, gateway) as open_to_it:
        assert httpx.post(open_to_it.url + DRAIN, headers=sent).status_code == 202
        if allowed != "*":
            sent["origin"] = "https://evil.example"
            assert httpx.post(open_to_it.url + DRAIN, headers=sent).status_code == 403
