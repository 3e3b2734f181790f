"""A worker's way to the fronts: it follows what it is told, and comes back after it was turned away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from common.counters import Counters
from common.endpoints import Endpoint
from transfer.addresses import bind
from transfer.cluster_key import ClusterKey
from transfer.fronts import Fronts
from transfer.sockets import Sockets

OURS = ClusterKey(*zmq.curve_keypair())
LONGEST = 1000
HERE = Endpoint("127.0.0.1", None)
WITHOUT_A_KEY = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting of ZMTP 3.1 (https://rfc.zeromq.org/spec/37) as a process without a key sends it."""


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 40))


async def greet_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A front without a key, which leaves the hanging up to us. libzmq's own hangs up as soon as it has read our
    greeting; whether we have read its own by then, and so know why, is a race that can be lost for as long as one
    likes: ZeroMQ then goes on calling by itself, and nothing needs to be called again."""
    writer.write(WITHOUT_A_KEY)
    await reader.read()
    writer.close()


def test_a_front_that_listens_on_every_address_is_reached_where_the_coordinator_is() -> None:
    async def story() -> None:
        ours, theirs = Sockets(Counters()), Sockets(Counters())
        try:
            front = theirs.listening(zmq.PULL, LONGEST, "tokens")
            told = Endpoint("0.0.0.0", bind(front, Endpoint("*", None), "--x")).told()
            fronts = Fronts(ours)
            fronts.follow({"front-0": str(told)}, HERE)
            socket = fronts.get("front-0")
            assert socket is not None and fronts.get("front-1") is None
            fronts.follow({"front-0": str(told)}, HERE)
            assert fronts.get("front-0") is socket, "what has not moved is left as it is"
            await socket.send(b"hello")
            assert await front.recv() == b"hello"
            fronts.follow({}, HERE)
            assert fronts.get("front-0") is None and socket.closed
        finally:
            await ours.end(0)
            await theirs.end(0)

    run(story())


def test_a_front_that_turned_us_away_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ itself never calls again after that, and tokens would wait in the socket for ever."""
    monkeypatch.setattr("transfer.fronts.CALL_AGAIN_S", 0.1)

    async def story() -> None:
        counters = Counters()
        ours = Sockets(counters, OURS)
        without = await asyncio.start_server(greet_and_wait, HERE.host)
        port = without.sockets[0].getsockname()[1]
        fronts = Fronts(ours)
        fronts.follow({"front-0": f"tcp://127.0.0.1:{port}"}, HERE)
        first = fronts.get("front-0")
        async with asyncio.timeout(20):
            while fronts.get("front-0") is first:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        without.close()
        await without.wait_closed()
        theirs = Sockets(Counters(), OURS)
        try:
            front = theirs.listening(zmq.PULL, LONGEST, "tokens")
            bind(front, Endpoint("127.0.0.1", port), "--x")
            heard = asyncio.ensure_future(front.recv())
            async with asyncio.timeout(5):
                while not heard.done():
                    socket = fronts.get("front-0")
                    assert socket is not None
                    sent = asyncio.ensure_future(socket.send(b"hello"))
                    await asyncio.sleep(0.1)
                    sent.cancel()
            assert heard.result() == b"hello"
            assert counters.total("failed_handshakes_total") >= 1
        finally:
            await theirs.end(0)
            await ours.end(0)

    run(story())
