"""Keys, ids and last resorts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.request import FrontId
from coordinator.door.front_door import MAX_REQUEST_ID_CHARS
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

TEXT: dict[str, Any] = {"model": "smol", "prompt": "hi"}
GUARDED = [
    "/metrics",
    "/version",
    "/nope",
    "/openapi.json",
    "/health/",
    "/v1/models",
    "/v1/nope",
    "/admin/workers",
    "/admin/requests/known",
]


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer) -> Iterator[Served]:
    gateway = ScriptedGateway()
    app = create_app(
        gateway,
        tokenizer,
        gateway.metrics,
        served_models=("smol",),
        api_keys=("first-key", "second-key"),
        front=FrontId("f"),
    )
    with serving(app, gateway) as served:
        yield served


def get(served: Served, path: str, authorization: str | bytes | None) -> httpx.Response:
    headers = {} if authorization is None else {"authorization": authorization}
    return httpx.get(served.url + path, headers=headers)  # type: ignore[arg-type]


@pytest.mark.parametrize("authorization", [None, "Bearer wrong"])
def test_health_needs_no_key(locked: Served, authorization: str | None) -> None:
    assert get(locked, "/health", authorization).status_code == 200


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer first",
        "Bearer first-keyx",
        "Basic first-key",
        "first-key",
        b"Bearer \xff",
    ],
)
def test_what_needs_one(locked: Served, path: str, authorization: str | bytes | None) -> None:
    response = get(locked, path, authorization)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "first-key" not in response.text


@pytest.mark.parametrize("authorization", ["Bearer first-key", "bearer second-key", "Bearer  first-key"])
def test_any_of_the_keys_opens(locked: Served, authorization: str) -> None:
    for path in ("/admin/workers", "/metrics", "/version", "/v1/models"):
        assert get(locked, path, authorization).status_code == 200


def test_a_body_without_a_key_is_not_read(locked: Served) -> None:
    response = httpx.post(locked.url + "/v1/completions", content=b"x" * 100_000)
    assert response.status_code == 401
    assert locked.gateway.requests == []


def test_the_key_names_the_tenant_and_user_does_not(locked: Served) -> None:
    locked.gateway.answers(260)
    for key in ("first-key", "second-key", "first-key"):
        httpx.post(
            locked.url + "/v1/completions",
            json=TEXT | {"user": "u"},
            headers={"authorization": f"Bearer {key}"},
        )
    tenants = [request.tenant for request in locked.gateway.requests]
    assert tenants[0] == tenants[2] != tenants[1]
    assert not any("key" in tenant.removeprefix("key-") or tenant == "u" for tenant in tenants)


def test_an_id_is_echoed_and_names_nothing(served: Served, client: httpx.Client) -> None:
    served.gateway.answers(260)
    ids = []
    for _ in range(2):
        response = client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        ids.append(response.json()["id"])
    assert len(set(ids)) == 2
    for path in ("/health", "/nope", "/v1/models/x"):
        assert client.get(path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert "x-request-id" not in client.get("/health").headers
    long = client.get("/health", headers={"x-request-id": "a" * 1000}).headers["x-request-id"]
    assert long == "a" * MAX_REQUEST_ID_CHARS


def test_an_id_is_cleaned_before_it_is_echoed(served: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: a\xff\tb\r\n\r\n"
    )
    data = b""
    while part := connection.recv(4096):
        data += part
    connection.close()
    assert b"x-request-id: ab\r\n" in data


def test_what_no_route_caught_is_a_500(
    served: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bytes:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(served.gateway, "metrics_text", broken)
    response = client.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert client.get("/health").status_code == 200
