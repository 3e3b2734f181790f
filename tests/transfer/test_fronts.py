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


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 40))


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
        ours, without = Sockets(counters, OURS), Sockets(Counters())
        port = bind(without.listening(zmq.PULL, LONGEST, "tokens"), HERE, "--x")
        fronts = Fronts(ours)
        fronts.follow({"front-0": f"tcp://127.0.0.1:{port}"}, HERE)
        first = fronts.get("front-0")
        async with asyncio.timeout(20):  # once it could read why it is hung up on
            while fronts.get("front-0") is first:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        await without.end(0)
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
