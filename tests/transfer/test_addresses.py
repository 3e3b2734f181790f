"""Where a worker listens and what is told of it, by what it was given; and what it says where neither can be."""

from __future__ import annotations

import socket

import pytest
import zmq
import zmq.asyncio

from common.config import parse_worker
from common.endpoints import Endpoint
from common.errors import BadConfiguration, CannotBind
from transfer.addresses import address_towards, bind
from transfer.worker_process import own_endpoints

HERE = "10.1.1.1"


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.worker_process.address_towards", lambda there: HERE)


@pytest.mark.parametrize(
    ("flags", "listens", "told"),
    [
        ([], f"{HERE}:*", f"{HERE}:*"),
        (["--advertise=gpu7:5000"], "gpu7:5000", "gpu7:5000"),
        (["--bind=10.2.2.2:5000"], "10.2.2.2:5000", "10.2.2.2:5000"),
        (["--bind=0.0.0.0:5000"], "0.0.0.0:5000", f"{HERE}:5000"),
        (["--bind=[::]:5000", "--advertise=203.0.113.5:6000"], "[::]:5000", "203.0.113.5:6000"),
    ],
)
def test_what_is_told_can_be_reached(way: None, flags: list[str], listens: str, told: str) -> None:
    settings = parse_worker(["--coordinator=tcp://10.0.0.1:1", "--curve-key=k", *flags], "decode")
    assert [where.address for where in own_endpoints(settings)] == [listens, told]


def test_BR_123_an_address_with_a_zone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.worker_process.address_towards", lambda there: "fe80::2%eth0")
    settings = parse_worker(["--coordinator=tcp://[fe80::1%eth0]:1", "--curve-key=k"], "decode")
    with pytest.raises(BadConfiguration, match="--advertise HOST:PORT"):
        own_endpoints(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_is_reached_from_loopback(host: str) -> None:
    assert address_towards(Endpoint(host, 5)) in ("127.0.0.1", "::1")


def test_no_way_and_no_such_name_are_said() -> None:
    with pytest.raises(CannotBind, match=r"no way leads to tcp://no-such-host\.invalid:5.*--advertise"):
        address_towards(Endpoint("no-such-host.invalid", 5))


def test_a_port_that_is_taken_and_an_address_that_is_not_ours_are_said() -> None:
    context = zmq.asyncio.Context()
    taken = socket.create_server(("127.0.0.1", 0))
    listener = context.socket(zmq.PULL)
    try:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("198.51.100.7", 5000)):
            with pytest.raises(CannotBind, match=f"cannot listen at {host}:{port}: .*another --bind"):
                bind(listener, Endpoint(host, port), "--bind")
        assert bind(listener, Endpoint("localhost", None), "--bind") > 0, "ZeroMQ alone binds no name"
    finally:
        taken.close()
        context.destroy(linger=0)
