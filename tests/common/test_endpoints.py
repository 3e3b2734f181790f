"""Addresses as people write them are read from the last colon, and written back as ZeroMQ takes them."""

from __future__ import annotations

import pytest

from common.endpoints import Endpoint, is_loopback, parse_address, parse_endpoint


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5000", "127.0.0.1", 5000),
        ("tcp://[::1]:5000", "::1", 5000),
        ("tcp://[fe80::1%eth0]:5000", "fe80::1%eth0", 5000),
        ("tcp://gpu-7.rack_2.example:1", "gpu-7.rack_2.example", 1),
        ("tcp://*:65535", "*", 65535),
        ("tcp://127.0.0.1:*", "127.0.0.1", None),
    ],
)
def test_what_is_read_is_written_back(text: str, host: str, port: int | None) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)
    assert str(parse_endpoint(text)) == text
    assert parse_address(text.removeprefix("tcp://")).address == text.removeprefix("tcp://")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1:5000", "expected tcp://HOST:PORT"),
        ("udp://127.0.0.1:5000", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://::1:5000", "in brackets: tcp://[::1]:8701"),
        ("tcp://[gpu7]:5000", "gpu7 is no IPv6 address"),
        ("tcp://[127.0.0.1]:5000", "127.0.0.1 is no IPv6 address"),
        ("tcp://[::1:5000", "expected tcp://HOST:PORT"),
        ("tcp://gpu%7:5000", "'gpu%7' is no host"),
        ("tcp://-gpu:5000", "'-gpu' is no host"),
        ("tcp://a b:5000", "expected tcp://HOST:PORT"),
        ("tcp://gpu7:0", "from 1 to 65535"),
        ("tcp://gpu7:65536", "from 1 to 65535"),
        ("tcp://gpu7:5000;tcp://evil:1", "expected tcp://HOST:PORT"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_what_is_expected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_endpoint(text)
    assert words in str(refused.value)


def test_who_listens_everywhere_is_reached_where_it_was_reached_before() -> None:
    for host in ("*", "0.0.0.0", "::", "fe80::1%eth0"):
        assert Endpoint(host, 5).told() == Endpoint("*", 5)
    assert Endpoint("*", 5).reached_at("fd00::2") == Endpoint("fd00::2", 5)
    for host in ("10.0.0.1", "gpu7", "fd00::1"):
        assert Endpoint(host, 5).told() == Endpoint(host, 5) == Endpoint(host, 5).reached_at("elsewhere")


def test_loopback_is_known_by_its_number() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(
        map(is_loopback, ("10.0.0.1", "0.0.0.0", "::", "*", "fe80::1%lo", "localhost.evil.example", ""))
    )
