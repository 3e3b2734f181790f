"""Clients that leave, stall, send slowly or send too much, over a real uvicorn and raw sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from common.errors import DeadlinePassed, RequestFailed
from coordinator.door.connection import DROPPED
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.conftest import LIMITS
from tests.coordinator.scripted_gateway import ScriptedGateway, Served

TEXT: dict[str, Any] = {"model": "smol", "prompt": "hi"}
WORD = 260  # " the"


def eventually(true: Callable[[], object], within_s: float = 1.0) -> float:
    """Seconds until it was true."""
    started_s = time.monotonic()
    while not true():
        assert time.monotonic() - started_s < within_s, "it did not become true"
        time.sleep(0.005)
    return time.monotonic() - started_s


def raw(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(10)
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        if not part:
            break
        data += part
    return data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_for_admission(served: Served, stream: bool) -> None:
    served.gateway.answers(WORD, admit_s=30)
    connection = raw(served, TEXT | {"stream": stream})
    time.sleep(0.1)
    connection.close()
    eventually(lambda: served.gateway.withdrawn)
    assert served.gateway.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(served: Served, stream: bool) -> None:
    served.gateway.answers(WORD, first_s=30)
    connection = raw(served, TEXT | {"stream": stream})
    eventually(lambda: served.gateway.requests)
    connection.close()
    eventually(lambda: served.gateway.cancelled)
    assert served.gateway.cancelled[0][1] == "the client left"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gap_s", [0.02, 30])
def test_a_client_that_leaves_while_tokens_come(served: Served, stream: bool, gap_s: float) -> None:
    served.gateway.answers(*[WORD] * 2000, gap_s=gap_s)
    before = metric(served, 'kvferry_requests_aborted_total{phase="decoding"}')
    finished = metric(served, 'kvferry_request_success_total{finished_reason="abort"}')
    connection = raw(served, TEXT | {"stream": stream, "max_tokens": 2000})
    eventually(lambda: served.gateway.deltas_taken)
    if stream:
        read_until(connection, b"data: ")
    connection.close()
    eventually(lambda: served.gateway.cancelled)
    eventually(lambda: metric(served, 'kvferry_requests_aborted_total{phase="decoding"}') == before + 1)
    assert metric(served, 'kvferry_request_success_total{finished_reason="abort"}') == finished + 1


def metric(served: Served, name: str) -> float:
    text = httpx.get(served.url + "/metrics").text
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))


def test_a_client_that_resets_the_connection(served: Served) -> None:
    served.gateway.answers(*[WORD] * 2000, gap_s=0.01)
    connection = raw(served, TEXT | {"stream": True, "max_tokens": 2000})
    read_until(connection, b"data: ")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    eventually(lambda: served.gateway.cancelled)


def test_a_client_that_stops_reading_is_paused_and_then_dropped(served: Served, tokenizer: Tokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.text_bytes(id)))
    served.gateway.answers(*[longest] * 100_000, group=50)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listening.connect(("127.0.0.1", served.port))
    data = json.dumps(TEXT | {"stream": True, "max_tokens": 8000}).encode()
    listening.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    eventually(lambda: served.gateway.cancelled, within_s=LIMITS.write_timeout_s + 2)
    assert served.gateway.cancelled[0][1] == "its connection was cut: write_timeout"
    # What was made for it is bounded: sockets' buffers and one write, out of 100,000 tokens.
    assert served.gateway.deltas_taken * 50 * 80 < 16e6
    listening.close()


def test_a_slow_reader_gets_everything(served: Served, tokenizer: Tokenizer) -> None:
    served.gateway.answers(*[WORD] * 3000, finish="length", group=10)
    connection = raw(served, TEXT | {"stream": True, "max_tokens": 3000})
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(20_000)
        time.sleep(0.001)
    assert data.count(b"data: ") == 3000 + 2
    connection.close()


def test_BR_118_a_long_wait_is_kept_alive(served: Served) -> None:
    served.gateway.answers(WORD, WORD, first_s=0.7, gap_s=0.7)
    response = httpx.post(served.url + "/v1/completions", json=TEXT | {"stream": True})
    assert response.text.startswith(": waiting\n\n")
    assert response.text.count(": waiting\n\n") >= 2
    assert response.text.endswith("data: [DONE]\n\n")
    served.gateway.answers(WORD, first_s=0.7, error=RequestFailed("prefill failed"))
    response = httpx.post(served.url + "/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 200
    assert "event: error\ndata: " in response.text
    assert "[DONE]" not in response.text
    response = httpx.post(served.url + "/v1/completions", json=TEXT)
    assert response.status_code == 500


def test_a_request_in_the_queue_keeps_its_status(served: Served) -> None:
    served.gateway.phase = "waiting"
    served.gateway.answers(WORD, first_s=0.7, error=DeadlinePassed("too late"))
    response = httpx.post(served.url + "/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 408


def test_the_phase_of_an_abort_is_the_clusters(served: Served) -> None:
    name = 'kvferry_requests_aborted_total{phase="kv_ready"}'
    before = metric(served, name)
    served.gateway.phase = "kv_ready"
    served.gateway.answers(WORD, first_s=30)
    connection = raw(served, TEXT)
    eventually(lambda: served.gateway.requests)
    connection.close()
    eventually(lambda: metric(served, name) == before + 1)


def test_BR_109_a_body_that_is_too_large(served: Served) -> None:
    data = b'{"model": "' + b"x" * (LIMITS.max_body_bytes + 1) + b'"}'
    response = httpx.post(served.url + "/v1/completions", content=data)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert served.gateway.requests == []


def test_BR_109_a_body_that_is_too_large_and_does_not_say_so(served: Served) -> None:
    def chunks() -> Any:
        for _ in range(40):
            yield b"x" * (LIMITS.max_body_bytes // 20)

    response = httpx.post(served.url + "/v1/completions", content=chunks())
    assert response.status_code == 413


def test_a_client_that_reads_only_when_it_has_sent_it_all_gets_its_answer(served: Served) -> None:
    size = 30_000_000
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
    connection.sendall(b"x" * size)
    answer = read_until(connection, b"body_too_large")
    assert b"HTTP/1.1 413" in answer
    assert b"connection: close" in answer
    connection.close()


def test_BR_109_a_length_that_is_announced_is_refused_before_the_body(served: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(3)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
    assert b"413" in read_until(connection, b"\r\n")
    connection.close()


def test_BR_109_a_body_of_one_byte_at_a_time(served: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(5)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            try:
                connection.sendall(b" ")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    started_s = time.monotonic()
    thread.start()
    head = read_until(connection, b"request_body_timeout")
    took_s = time.monotonic() - started_s
    stop.set()
    thread.join()
    connection.close()
    assert b"HTTP/1.1 408" in head
    # The loop's clock counts whole milliseconds, and stands still within a turn: a timer may come that much early.
    assert 0.95 * LIMITS.body_timeout_s <= took_s < LIMITS.body_timeout_s + 1


def test_a_client_that_leaves_in_the_middle_of_its_body(served: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    assert httpx.get(served.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "smol", "prompt": "hi", "temperature": NaN}',
        b'{"model": "smol", "prompt": "hi", "top_p": Infinity}',
        b'{"model": "smol", "prompt": "hi", "temperature": 1e309}',
        b'{"model": "smol", "prompt": "\\ud83d"}',
        b'{"model": "smol", "prompt": "hi", "max_tokens": 1e18}',
        b'{"model": "smol", "prompt": "hi", "tools": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "smol", "prompt": "hi", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b"{",
        b"",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_request(served: Served, body: bytes, path: str) -> None:
    response = httpx.post(served.url + path, content=body)
    assert response.status_code in (400, 422)
    error = response.json()["error"]
    assert error["message"]
    assert len(response.content) < 4096
    if path == "/v1/completions":
        assert response.status_code == 400


def test_two_requests_on_one_connection(served: Served) -> None:
    served.gateway.answers(WORD)
    with httpx.Client(base_url=served.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=TEXT).status_code == 200
            assert client.post("/v1/completions", json=TEXT | {"stream": True}).text.endswith(
                "data: [DONE]\n\n"
            )
            assert client.post("/v1/completions", content=b"{").status_code == 400


def test_many_clients_at_once_end_where_they_began(served: Served) -> None:
    """Forty streams, half of which are left half-way; the others are whole."""
    served.gateway.answers(*[WORD] * 100, gap_s=0.005)
    whole: list[int] = []

    def one(index: int) -> None:
        connection = raw(served, TEXT | {"stream": True, "max_tokens": 100})
        if index % 2:
            read_until(connection, b"data: ")
        else:
            whole.append(read_until(connection, b"[DONE]").count(b"data: "))
        connection.close()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(served.gateway.cancelled) == 20)
    assert whole == [102] * 20


@pytest.mark.parametrize("cut", [True, False])
def test_a_client_that_leaves_while_a_comment_waits_for_it(tokenizer: Tokenizer, cut: bool) -> None:
    """Its socket is full and nothing is generated. Its place and its blocks are free soon after it has gone."""
    gateway = ScriptedGateway()
    gateway.answers(WORD, WORD, gap_s=60)
    limits = replace(LIMITS, keep_alive_s=0.05)
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), limits=limits)
    body = json.dumps(TEXT | {"stream": True}).encode()
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
        "state": {},
    }

    async def until_it_ends() -> None:
        gone, waits = asyncio.Event(), asyncio.Event()
        unread = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Returns when the connection is gone, as uvicorn's does."""
            if message.get("body", b"").startswith(b":"):
                waits.set()
                await gone.wait()

        serving = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.wait_for(waits.wait(), 5)
        if cut:
            scope["state"][DROPPED] = "write_timeout"
        gone.set()
        await asyncio.wait_for(serving, 5)

    asyncio.run(until_it_ends())
    reason = "its connection was cut: write_timeout" if cut else "the client left"
    assert [end[1] for end in gateway.cancelled] == [reason]
