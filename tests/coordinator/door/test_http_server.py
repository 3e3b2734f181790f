"""The listening socket and what it needs of the system."""

from __future__ import annotations

import resource
import socket

import pytest

from common.config import parse_coordinator
from common.errors import CannotBind
from coordinator.door.http_server import FILES_BESIDE_CONNECTIONS, listen, within_open_files
from coordinator.door.limits import SEND_BUFFER_BYTES, Limits
from coordinator.launcher import _url, reserve_port


@pytest.mark.parametrize(
    ("soft", "hard", "max_connections", "asked"),
    [
        (20_000, 20_000, 1000, None),
        (256, 20_000, 1000, 1000 + FILES_BESIDE_CONNECTIONS),
        (256, 1024, 1024 - FILES_BESIDE_CONNECTIONS, 1024),
        (256, resource.RLIM_INFINITY, 1000, 1000 + FILES_BESIDE_CONNECTIONS),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None),
    ],
)
def test_open_files_are_asked_for_and_connections_fit_them(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, max_connections: int, asked: int | None
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert within_open_files(Limits(max_connections=1000)).max_connections == max_connections
    assert calls == ([] if asked is None else [(asked, hard)])


def test_accepted_sockets_have_the_send_buffer_that_is_stated() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:  # Linux shows the double, which is what it uses
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SEND_BUFFER_BYTES


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(CannotBind, match=str(listener.getsockname()[1])):
        listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "127.0.0.1"])
def test_BR_123_every_way_to_write_an_address_is_listened_at(host: str) -> None:
    with listen(host, 0) as listener, reserve_port(host) as held:
        assert ("6" in listener.family.name) == (":" in host) == ("6" in held.family.name)
        socket.create_connection(listener.getsockname()[:2], 2).close()
    url = _url(parse_coordinator(["--host", host], {}), 8000)
    assert url == f"http://{'[::1]' if ':' in host else host}:8000"


def test_BR_123_a_name_that_only_ipv6_knows_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo("::1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    with listen("six.example", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "fe80::1%nowhere0", "1.2.3.4"])
def test_BR_123_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(CannotBind, match=host):
        listen(host, 0)
