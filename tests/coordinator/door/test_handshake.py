"""Connections that never become TLS: counted and ended like any that says nothing."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coordinator.door.limits import Limits
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.door.test_connection import closed, connect, rest, until
from tests.coordinator.door.test_tls import certificate
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

LIMITS = Limits(head_timeout_s=0.5, max_connections=6)


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Served]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(Path(tmp_path_factory.mktemp("tls")), "local", "IP:127.0.0.1"))
    gateway = ScriptedGateway()
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), limits=LIMITS)
    with serving(app, gateway, LIMITS, context) as served:
        yield served


def version(served: Served) -> int:
    return httpx.get(f"https://127.0.0.1:{served.port}/version", verify=False, timeout=5).status_code


def hello() -> bytes:
    """What a client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("said", [b"", hello()[:50], hello()], ids=["nothing", "half", "hello"])
def test_a_handshake_that_does_not_end_is_ended(module_server: Served, said: bytes) -> None:
    before = closed(module_server, "tls_handshake_timeout")
    started_s = time.monotonic()
    rest(connect(module_server, said))
    assert 0.4 < time.monotonic() - started_s < 3
    until(lambda: closed(module_server, "tls_handshake_timeout") == before + 1)


def test_what_is_not_tls_is_closed_at_once(module_server: Served) -> None:
    before = closed(module_server, "tls_handshake_timeout")
    rest(connect(module_server, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"))
    assert closed(module_server, "tls_handshake_timeout") == before, "its limit was not waited for"
    assert version(module_server) == 200


def test_the_silent_are_counted_and_make_room(module_server: Served) -> None:
    before = closed(module_server, "made_room")
    silent = [connect(module_server) for _ in range(4 * LIMITS.max_connections)]
    until(lambda: closed(module_server, "made_room") == before + 3 * LIMITS.max_connections)
    assert version(module_server) == 200
    assert closed(module_server, "made_room") > before + 3 * LIMITS.max_connections
    for connection in silent:
        connection.close()


def test_a_request_that_comes_with_the_end_of_the_handshake(module_server: Served) -> None:
    """In one packet: its bytes are there before anybody knows that the handshake is over."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(into, out, server_hostname="x")
    with socket.create_connection(("127.0.0.1", module_server.port), timeout=5) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(out.read())
                into.write(connection.recv(1 << 16))
        client.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        connection.sendall(out.read())
        answer = b""
        while b"version" not in answer:
            try:
                answer += client.read(1 << 16)
            except ssl.SSLWantReadError:
                into.write(connection.recv(1 << 16))
    assert b"200 OK" in answer
