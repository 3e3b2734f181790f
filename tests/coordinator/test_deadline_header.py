"""X-Kvferry-Deadline-Ms: read, refused by name, and given on less what has gone by."""

from __future__ import annotations

import httpx
import pytest

from common.errors import DeadlinePassed
from coordinator.deadline_header import DEADLINE_HEADER, left_s
from tests.coordinator.scripted_gateway import Served

TEXT = {"model": "smol", "prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1e3", "nan", "", "86400001", "1,5", "0.0000001", "٣"])
def test_what_is_no_deadline_is_refused_by_name(client: httpx.Client, served: Served, value: str) -> None:
    headers = {DEADLINE_HEADER.encode(): value.encode()}
    response = client.post("/v1/completions", json=TEXT, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == DEADLINE_HEADER
    assert DEADLINE_HEADER in response.json()["error"]["message"] and served.gateway.requests == []


@pytest.mark.parametrize("values", [(b"800", b"900"), (b"800", b"800"), (b"800, 900",)])
def test_two_of_them_are_refused_and_none_is_passed_over(
    client: httpx.Client, served: Served, values: tuple[bytes, ...]
) -> None:
    headers = [(DEADLINE_HEADER.encode(), value) for value in values]
    response = client.post("/v1/completions", json=TEXT, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == DEADLINE_HEADER
    assert served.gateway.requests == []


@pytest.mark.parametrize(("value", "limit_s"), [("2000", 2.0), ("1500.5", 1.5005), ("86400000", 86_400.0)])
def test_what_is_left_of_it_goes_to_the_cluster(
    client: httpx.Client, served: Served, value: str, limit_s: float
) -> None:
    served.gateway.answers(5)
    assert (
        client.post("/v1/completions", json=TEXT, headers={DEADLINE_HEADER.lower(): value}).status_code == 200
    )
    assert client.post("/v1/completions", json=TEXT).status_code == 200
    (given, none) = served.gateway.deadlines_s
    assert given is not None and limit_s - 1 < given < limit_s and none is None


def test_one_that_passed_before_its_request_could_be_asked_for(client: httpx.Client, served: Served) -> None:
    response = client.post("/v1/completions", json=TEXT, headers={DEADLINE_HEADER: "0.001"})
    assert response.status_code == 408 and response.json()["error"]["code"] == "deadline"
    assert served.gateway.requests == []


def test_what_is_left() -> None:
    assert left_s(None, 5.0) is None and left_s(2.0, 0.5) == 1.5
    with pytest.raises(DeadlinePassed, match="2000 ms"):
        left_s(2.0, 2.0)
