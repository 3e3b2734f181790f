"""The listening socket and what it needs of the system."""

from __future__ import annotations

import resource
import socket

import pytest

from common.errors import CannotBind
from coordinator.door.http_server import FILES_BESIDE_CONNECTIONS, listen, within_open_files
from coordinator.door.limits import SEND_BUFFER_BYTES, Limits


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
