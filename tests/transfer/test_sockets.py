"""Who has the cluster's key is let in, and nobody else; both sides say why, and a refused one is let in later."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from common.counters import Counters
from common.endpoints import Endpoint
from transfer.addresses import bind
from transfer.cluster_key import ClusterKey
from transfer.handshakes import SAY_EVERY_S, Failures, failure_of
from transfer.sockets import Sockets

OURS, OTHER = (ClusterKey(*zmq.curve_keypair()) for _ in range(2))
HERE = Endpoint("127.0.0.1", None)
LONGEST = 1000  # bytes of a message; a handshake takes some 300
KINDS = [(zmq.ROUTER, zmq.DEALER), (zmq.PULL, zmq.PUSH)]


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 30))


async def until(true: Callable[[], Any], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def two(
    listens: ClusterKey | None, calls: ClusterKey | None
) -> AsyncIterator[tuple[Sockets, Sockets, Counters, Counters]]:
    counters = Counters(), Counters()
    both = Sockets(counters[0], listens), Sockets(counters[1], calls)
    try:
        yield *both, *counters
    finally:
        for one in both:
            await one.end(0)


@pytest.mark.parametrize(("listens", "calls"), KINDS)
@pytest.mark.parametrize("key", [None, OURS])
def test_who_has_the_same_key_is_let_in(key: ClusterKey | None, listens: int, calls: int) -> None:
    async def story() -> None:
        async with two(key, key) as (a, b, refused, failed):
            server, client = a.listening(listens, LONGEST, "a"), b.calling(calls, LONGEST, "b")
            client.connect(str(Endpoint("127.0.0.1", bind(server, HERE, "--x"))))
            await client.send(b"hello")
            assert (await server.recv_multipart())[-1] == b"hello"
            assert server.getsockopt(zmq.MECHANISM) == (zmq.CURVE if key else zmq.NULL)
            assert refused.values == failed.values == {}

    run(story())


@pytest.mark.parametrize(("listens", "calls"), KINDS)
@pytest.mark.parametrize(
    ("there", "here", "reason", "said_there", "said_here"),
    [
        (OURS, OTHER, "other_key", "a process with another key calls", "compare `kvferry keys show"),
        (OURS, ClusterKey(OURS.public, OTHER.secret), "other_key", "another key calls", "compare `kvferry keys"),
        (OURS, None, "no_key", "start that one with --curve-key", "start this one with --curve-key"),
        (None, OURS, "no_key", "start this one with --curve-key too", "compare `kvferry keys show|start that one"),
    ],
)  # fmt: skip
def test_who_has_not_is_kept_out_and_both_say_why_within_seconds(
    caplog: pytest.LogCaptureFixture,
    listens: int,
    calls: int,
    there: ClusterKey | None,
    here: ClusterKey | None,
    reason: str,
    said_there: str,
    said_here: str,
) -> None:
    def said(who: str, words: str) -> bool:
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert not any(OURS.secret.decode() in line for line in lines)
        return any(line.startswith(f"{who}: ") and re.search(words, line) for line in lines)

    async def story() -> None:
        async with two(there, here) as (a, b, refused, failed):
            server = a.listening(listens, LONGEST, "--control")
            where = str(Endpoint("127.0.0.1", bind(server, HERE, "--x")))
            async with asyncio.timeout(5.0):
                while not (said("--control", said_there) and said("the coordinator", said_here)):
                    client = b.calling(calls, LONGEST, "the coordinator")
                    client.connect(where)
                    sent = asyncio.ensure_future(client.send(b"hello"))
                    await asyncio.sleep(0.1)
                    sent.cancel()
            assert refused.values[f'refused_handshakes_total{{reason="{reason}"}}'] >= 1
            assert failed.total("failed_handshakes_total") >= 1
            assert not await server.poll(0)

    run(story())


def test_to_know_the_public_half_is_not_enough() -> None:
    """A stranger with a pair of his own speaks to the right key, and is asked for."""

    async def story() -> None:
        counters = Counters()
        sockets = Sockets(counters, OURS)
        context = zmq.asyncio.Context()
        try:
            port = bind(sockets.listening(zmq.ROUTER, LONGEST, "a"), HERE, "--x")
            stranger = context.socket(zmq.DEALER)
            stranger.curve_serverkey = OURS.public
            stranger.curve_publickey, stranger.curve_secretkey = OTHER.public, OTHER.secret
            stranger.connect(f"tcp://127.0.0.1:{port}")
            await until(lambda: counters.total("refused_handshakes_total") == 1)
        finally:
            context.destroy(linger=0)
            await sockets.end(0)

    run(story())


def test_who_was_refused_hears_of_it_and_may_call_again_with_another_socket() -> None:
    async def story() -> None:
        heard: list[str] = []
        async with two(None, OURS) as (a, b, _, _):
            server = a.listening(zmq.PULL, LONGEST, "a")
            where = Endpoint("127.0.0.1", bind(server, HERE, "--x"))
            b.calling(zmq.PUSH, LONGEST, "b", gave_up=lambda: heard.append("gave up")).connect(str(where))
            await until(lambda: heard, 20.0)  # once it could read why it is hung up on
            await asyncio.sleep(0.3)
            assert heard == ["gave up"], "ZeroMQ calls no more after this"

    run(story())


def test_those_who_never_finish_a_handshake_hold_up_nobody_and_are_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transfer.sockets.HANDSHAKE_MS", 2000)

    async def story() -> None:
        async with two(OURS, OURS) as (a, b, refused, _):
            server = a.listening(zmq.ROUTER, LONGEST, "a")
            port = bind(server, HERE, "--x")
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
            garbage = [
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(200),
                b"\xff" * 64,
                b"\xff" + bytes(8) + b"\x7f\x03\x01",
            ]
            for number, one in enumerate(idle[:200]):
                one.sendall(garbage[number % len(garbage)])
            client = b.calling(zmq.DEALER, LONGEST, "b")
            client.connect(f"tcp://127.0.0.1:{port}")
            await client.send(b"hello")
            async with asyncio.timeout(1.5):
                assert (await server.recv_multipart())[-1] == b"hello"
            # ZeroMQ says nothing of those whose first bytes are none of its own: it hangs up on them at once.
            await until(lambda: refused.total("refused_handshakes_total") >= 100, 10.0)
            for one in idle:
                one.settimeout(2.0)
                try:
                    while one.recv(100):  # its greeting
                        pass
                except ConnectionResetError:
                    pass
                one.close()

    run(story())


def test_a_message_that_is_too_long_costs_its_sender_the_connection_and_nobody_else() -> None:
    async def story() -> None:
        async with two(OURS, OURS) as (a, b, _, _):
            server = a.listening(zmq.PULL, LONGEST, "a")
            where = str(Endpoint("127.0.0.1", bind(server, HERE, "--x")))
            good, bad = (b.calling(zmq.PUSH, LONGEST, "b") for _ in range(2))
            good.connect(where)
            bad.connect(where)
            await bad.send(bytes(LONGEST + 1))
            await asyncio.sleep(0.1)
            await good.send(b"hello")
            assert await server.recv() == b"hello" and not await server.poll(100)

    run(story())


@pytest.mark.parametrize("key", [None, OURS])
def test_ipv6_and_every_address(key: ClusterKey | None) -> None:
    async def story() -> None:
        for listens, called in (("::1", "::1"), ("*", "::1"), ("*", "127.0.0.1"), ("localhost", "localhost")):
            async with two(key, key) as (a, b, _, _):
                server = a.listening(zmq.PULL, LONGEST, "a")
                port = bind(server, Endpoint(listens, None), "--x")
                client = b.calling(zmq.PUSH, LONGEST, "b")
                client.connect(str(Endpoint(called, port)))
                await client.send(b"hello")
                assert await server.recv() == b"hello", (listens, called)

    run(story())


def test_each_kind_is_said_once_in_a_while_and_counted_every_time(caplog: pytest.LogCaptureFixture) -> None:
    now, counters = [100.0], Counters()
    failures = Failures(counters, keyed=True, clock=lambda: now[0])
    for _ in range(5):
        failures.note("a", zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, listens=True)
    failures.note("b", zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, listens=True)
    now[0] += SAY_EVERY_S
    failures.note("a", zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, listens=True)
    said = [record.getMessage() for record in caplog.records if record.name == "transfer.handshakes"]
    assert [line.split(":")[0] for line in said] == ["a", "b", "a"]
    assert said[2].endswith("(4 more like it)")
    assert counters.total("refused_handshakes_total") == 7
    for number in range(3000):
        failures.note(str(number), zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, listens=True)
    assert len(failures._said) <= 1000


@pytest.mark.parametrize("key", [None, OURS])
def test_bytes_that_pass_for_a_greeting_are_not_said_to_be_a_process_of_ours(
    key: ClusterKey | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with two(key, None) as (a, _, refused, _):
            port = bind(a.listening(zmq.ROUTER, LONGEST, "a"), HERE, "--x")
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"\xff" * 64)
                await until(lambda: refused.values)
            assert refused.values == {'refused_handshakes_total{reason="no_key"}': 1.0}

    run(story())
    (said,) = caplog.messages
    assert "or something that speaks no kvferry" in said


def test_a_probe_of_a_port_is_nothing_to_write_of() -> None:
    for keyed in (True, False):
        probe = failure_of(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, keyed=keyed, listens=True)
        assert (probe.reason, probe.words) == ("unfinished", "")
