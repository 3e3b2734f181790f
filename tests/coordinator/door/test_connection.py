"""Clients that are slow, large or many before a request is even there, over raw sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from coordinator.door.connection import MAX_HEAD_BYTES, MAX_PIPELINED
from coordinator.door.limits import SEND_BUFFER_BYTES, Limits
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

LIMITS = Limits(
    head_timeout_s=0.4, write_timeout_s=0.5, max_connections=6, max_concurrent_requests=2, keep_alive_s=0.25
)
HEAD = b"GET /version HTTP/1.1\r\nhost: x\r\n"
WORD = 260


@pytest.fixture(scope="module")
def module_server(tokenizer: Tokenizer) -> Iterator[Served]:
    gateway = ScriptedGateway()
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), limits=LIMITS)
    with serving(app, gateway, LIMITS) as served:
        yield served


OPENED: list[socket.socket] = []


@pytest.fixture
def tight(module_server: Served) -> Iterator[Served]:
    module_server.gateway.reset()
    yield module_server
    while OPENED:
        OPENED.pop().close()
    until(lambda: not module_server.server.server_state.connections)


def until(true: object, within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it did not become true"
        time.sleep(0.01)


def connect(served: Served, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port))
    OPENED.append(connection)
    connection.settimeout(5)
    connection.sendall(data)
    return connection


def post(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    data = json.dumps({"model": "smol", "prompt": "hi", **body}).encode()
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    connection.close()
    return data


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head
    return int(head.split()[1]), str(json.loads(body)["error"]["code"])


def counted(served: Served, name: str, reason: str) -> float:
    label = f'kvferry_{name}{{reason="{reason}"}}'
    lines = served.gateway.metrics_text().decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(label)), 0.0)


def closed(served: Served, reason: str) -> float:
    return counted(served, "http_connections_closed_total", reason)


# ---------------------------------------------------------------- heads


def test_who_says_nothing_is_cut(tight: Served) -> None:
    started_s = time.monotonic()
    assert rest(connect(tight)) == b""
    assert 0.3 < time.monotonic() - started_s < 3
    assert closed(tight, "request_head_timeout") == 1


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"])
def test_a_head_of_one_byte_at_a_time_is_ended_in_time(tight: Served, before: bytes) -> None:
    """On a new connection, and on one that has served."""
    connection = connect(tight, before)
    if before:
        assert b"200 OK" in connection.recv(4096)
    started_s = time.monotonic()
    for byte in HEAD * 9:
        try:
            connection.send(bytes([byte]))
        except OSError:
            break
        time.sleep(0.05)
        if time.monotonic() - started_s > 0.6:
            break
    assert code(rest(connection)) == (408, "request_head_timeout")
    assert time.monotonic() - started_s < 3


def test_a_body_that_trickles_after_its_answer_is_cut(tight: Served) -> None:
    connection = connect(tight, b"GET /version HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n")
    assert b"200 OK" in connection.recv(4096)
    started_s = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - started_s < 3:
            connection.send(b"x")
            time.sleep(0.05)
    assert time.monotonic() - started_s < 2
    connection.close()


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, b"x-a: " + b"a" * 50_000, b"a" * 50_000, b"a" * 50_000],
        [HEAD + b"x-a: %s\r\n" % (b"a" * 1000) * 100],
        [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
    ],
)
def test_a_head_without_end_is_431(tight: Served, parts: list[bytes]) -> None:
    connection = connect(tight)
    for part in parts:
        connection.sendall(part)
        time.sleep(0.02)
    assert code(rest(connection)) == (431, "head_too_large")


def test_a_large_head_is_none_of_that(tight: Served) -> None:
    connection = connect(tight, HEAD + b"x-a: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n")
    assert b"200 OK" in connection.recv(4096)
    connection.close()


def test_what_is_not_http_gets_the_error_object(tight: Served) -> None:
    assert code(rest(connect(tight, b"not http at all\r\n\r\n"))) == (400, "invalid_http")


def test_requests_in_a_row_have_a_limit(tight: Served) -> None:
    """They would be held as objects while the first one is answered, at a hundred bytes for each of theirs."""
    tight.gateway.answers(WORD, first_s=0.3)
    few = connect(tight, post({}) + (HEAD + b"\r\n") * MAX_PIPELINED)
    data = b""
    while data.count(b"200 OK") < 1 + MAX_PIPELINED:
        part = few.recv(1 << 20)
        assert part
        data += part
    few.close()


@pytest.mark.parametrize("too_many", [1, 5])
def test_what_came_before_one_too_many_is_answered(tight: Served, too_many: int) -> None:
    """The connection was cut, and the answers with it."""
    tight.gateway.answers(WORD, first_s=0.2)
    before = closed(tight, "pipeline_too_long")
    connection = connect(tight, post({}) + (HEAD + b"\r\n") * (MAX_PIPELINED + too_many))
    until(lambda: tight.gateway.requests)
    connection.sendall(b"nothing that is read any more")
    answered, refusal, _ = (data := rest(connection)).rpartition(b"HTTP/1.1 400")
    assert answered.count(b"HTTP/1.1 200 OK") == 1 + MAX_PIPELINED and refusal
    assert code(data[len(answered) :]) == (400, "pipeline_too_long")
    assert closed(tight, "pipeline_too_long") == before + 1


def test_who_leaves_after_one_too_many_is_noticed(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=30)
    connection = connect(tight, post({}) + (HEAD + b"\r\n") * (MAX_PIPELINED + 1))
    until(lambda: tight.gateway.requests)
    connection.close()
    until(lambda: tight.gateway.cancelled, within_s=1)


@pytest.mark.parametrize("at_once", [True, False])
def test_who_leaves_with_requests_in_a_row_ends_the_running_one(tight: Served, at_once: bool) -> None:
    tight.gateway.answers(WORD, first_s=30)
    more = HEAD + b"\r\n"
    connection = connect(tight, post({}) + (more if at_once else b""))
    until(lambda: tight.gateway.requests)
    asked = tight.gateway.requests[0].request_id
    if not at_once:
        connection.sendall(more)
        time.sleep(0.1)
    connection.close()
    until(lambda: (asked, "the client left") in [end[:2] for end in tight.gateway.cancelled])


def body_of(num_bytes: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes


def test_who_leaves_with_a_large_body_behind_its_running_request_is_noticed(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=30)
    connection = connect(tight, post({}) + body_of(600_000) + b"x" * 500_000)
    until(lambda: tight.gateway.requests)
    time.sleep(0.2)
    connection.close()
    until(lambda: tight.gateway.cancelled, within_s=1)


def test_bodies_behind_a_running_request_are_bounded(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=30)
    before = closed(tight, "pipeline_too_long")
    size = LIMITS.max_body_bytes // 2
    connection = connect(tight, post({}))
    with pytest.raises(OSError):
        for _ in range(3):
            connection.sendall(body_of(size) + b"x" * size)
            time.sleep(0.1)
        connection.recv(1)
        raise ConnectionResetError
    assert closed(tight, "pipeline_too_long") == before + 1
    until(lambda: tight.gateway.cancelled)


def test_a_head_behind_a_running_request_is_counted_too(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=5)
    connection = connect(tight, post({}) + HEAD + b"x-a: ")
    with pytest.raises(OSError):
        for _ in range(100):
            connection.sendall(b"a" * 10_000)
            time.sleep(0.01)
    connection.close()


# ---------------------------------------------------------------- numbers


def test_the_longest_idle_connection_makes_room(tight: Served) -> None:
    with httpx.Client(base_url=tight.url) as client:
        assert client.get("/version").status_code == 200
        others = [connect(tight) for _ in range(LIMITS.max_connections - 1)]
        until(lambda: len(tight.server.server_state.connections) == LIMITS.max_connections)
        late = connect(tight, HEAD + b"\r\n")
        assert b"200 OK" in late.recv(4096)
        assert closed(tight, "made_room") == 1
        for connection in (*others, late):
            connection.close()


def test_where_none_is_idle_a_new_connection_is_503(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=30)
    waiting = [connect(tight, post({})[:-1]) for _ in range(LIMITS.max_connections)]
    until(lambda: len(tight.server.server_state.connections) == LIMITS.max_connections)
    time.sleep(0.05)
    answer = rest(connect(tight))
    assert code(answer) == (503, "too_many_connections") and b"retry-after" in answer
    for connection in waiting:
        connection.close()


def test_more_requests_than_places_are_429_and_small_routes_go_on(tight: Served) -> None:
    tight.gateway.answers(WORD, first_s=30)
    running = [connect(tight, post({})) for _ in range(LIMITS.max_concurrent_requests)]
    until(lambda: len(tight.gateway.requests) == 2)
    before = counted(tight, "requests_rejected_total", "too_many_requests")
    answer = httpx.post(tight.url + "/v1/completions", json={"model": "smol", "prompt": "hi"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "too_many_requests"
    for path in ("/health", "/metrics", "/admin/workers", "/v1/models"):
        assert httpx.get(tight.url + path).status_code == 200
    assert counted(tight, "requests_rejected_total", "too_many_requests") == before + 1
    for connection in running:
        connection.close()
    tight.gateway.answers(WORD)
    until(
        lambda: httpx.post(tight.url + "/v1/completions", json={"model": "smol", "prompt": "hi"}).is_success
    )


# ---------------------------------------------------------------- readers


def reads_nothing(served: Served, data: bytes) -> socket.socket:
    connection = socket.socket()
    OPENED.append(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_takes_nothing_is_dropped_also_when_all_is_written(tight: Served, stream: bool) -> None:
    """An answer sent whole is written in one piece; the connection would then wait for its reader for ever."""
    tight.gateway.answers(*[WORD] * 4000, group=100)
    before = closed(tight, "write_timeout")
    connection = reads_nothing(tight, post({"stream": stream, "max_tokens": 8000, "logprobs": 5}))
    until(lambda: closed(tight, "write_timeout") == before + 1)
    until(lambda: not tight.server.server_state.connections)
    connection.close()


@pytest.mark.parametrize("tokens", [100, 1])
def test_what_is_held_for_a_reader_that_reads_nothing_is_bounded(tight: Served, tokens: int) -> None:
    """Left alone, Linux would take megabytes from us for it, and the relay, which waits for nobody, would fill our own
    memory: one token at a time goes that way."""
    tight.gateway.answers(*[WORD] * 60_000, group=tokens)
    tight.gateway.relays_all = True
    connection = reads_nothing(tight, post({"stream": True, "max_tokens": 8000}))
    until(lambda: tight.gateway.deltas_taken > 2)
    time.sleep(0.3)
    chunk_bytes = 190  # at least, with its envelope
    taken_bytes = tight.gateway.deltas_taken * tokens * chunk_bytes
    assert taken_bytes < 2 * SEND_BUFFER_BYTES + 4 * 100 * 2 * chunk_bytes + 300_000
    connection.close()
