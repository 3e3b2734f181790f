"""Each of the four sockets that are listened at, under real owners with the cluster's key: a stranger who knows every
address, every name and the public half neither says nor hears anything, under whatever name it comes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import uvloop
import zmq
import zmq.asyncio

from common.counters import Counters
from common.endpoints import Endpoint, parse_endpoint
from common.messages import (
    Block,
    Cancel,
    Heartbeat,
    Load,
    Message,
    PeerAddress,
    Register,
    Sender,
    TokenRow,
    Tokens,
)
from common.request import Attempt, Incarnation, RequestId, WorkerId, first_attempt_of_epoch
from common.wire import encode
from coordinator.cluster import Cluster
from coordinator.control_plane import FRONT, ControlPlane
from coordinator.metrics import Metrics
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from tests.coordinator.cluster_bench import card
from transfer.cluster_key import ClusterKey
from transfer.links import Links
from transfer.tcp import TcpReceiving

OURS = ClusterKey(*zmq.curve_keypair())
HERE = Endpoint("127.0.0.1", None)
ABOUT = (RequestId("x"), Attempt(1))
WORKER, PEER = Sender("d0", Incarnation(1)), Sender("p0", Incarnation(1))
BLOCK_BYTES = 4096


def card_of(name: str) -> Register:
    nowhere = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    return replace(card(name), address=PeerAddress(WorkerId(name), Incarnation(1), *nowhere))


async def until(true: Callable[[], object], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


class Inside:
    """A coordinator, a decode worker's sockets that are registered there, and all that is said to either."""

    def __init__(self) -> None:
        registry = Registry(tokenizer_hash="t", fronts={})
        queue = WaitingQueue(max_requests=8, max_tokens=1000)
        self.cluster = Cluster(registry, queue, first_attempt=first_attempt_of_epoch(1))
        self.plane = ControlPlane(
            self.cluster, Metrics(("default",)), collocated=True, request_timeout_s=60, key=OURS
        )
        self.plane.start(HERE)
        self.tokens = self.plane.bind_tokens(HERE)
        registry.set_front(FRONT, self.tokens)
        self.control = self.plane._control.getsockopt_string(zmq.LAST_ENDPOINT)
        self.counters = Counters()
        self.links = Links(
            WORKER, self.counters, block_bytes=BLOCK_BYTES, receiving=[TcpReceiving()], key=OURS
        )
        self.address = self.links.bind(HERE)
        self.heard: list[object] = []

    async def register(self) -> None:
        def hear(*what: object) -> None:
            self.heard.append(what)

        self.links.start(self.control, hear, hear, hear)
        self.links.to_coordinator(card_of(WORKER.name))
        await until(lambda: self.heard, 5)
        self.heard.clear()

    @property
    def refused(self) -> float:
        name = "refused_handshakes_total"
        return self.counters.total(name) + self.cluster.counters.total(name)

    async def close(self) -> None:
        await self.links.close()
        await self.plane.close()


def doors(inside: Inside) -> Iterator[tuple[str, int, Sender, Message]]:
    """Where it is, how one comes, under whose name, and what would do harm."""
    load = Load(1, 0, 0, 1, 1, 0, 0.0)
    yield inside.control, zmq.DEALER, WORKER, Heartbeat(load, 0.0, (), {}, {}, {}, draining=True)
    yield inside.control, zmq.DEALER, Sender("evil", Incarnation(1)), card_of("evil")
    yield inside.tokens, zmq.PUSH, WORKER, Tokens(1, (TokenRow(*ABOUT, first=0, ids=(1,)),))
    yield inside.address.control, zmq.DEALER, PEER, Cancel(*ABOUT, "gone")
    yield inside.address.data, zmq.PUSH, PEER, Block(*ABOUT, index=0, part=0, checksum=0, size=4)


@pytest.mark.parametrize("knows", ["nothing", "the public half", "another key"])
def test_a_stranger_at_every_door(knows: str) -> None:
    async def story() -> None:
        inside, context = Inside(), zmq.asyncio.Context()
        try:
            await inside.register()
            made: list[zmq.asyncio.Socket] = []
            for endpoint, kind, name, message in doors(inside):
                before, one = inside.refused, context.socket(kind)
                made.append(one)
                if knows != "nothing":
                    public, one.curve_secretkey = zmq.curve_keypair()
                    one.curve_publickey = public
                    one.curve_serverkey = OURS.public if knows == "the public half" else public
                if kind == zmq.DEALER:
                    one.setsockopt(zmq.IDENTITY, f"{name.name}/{name.incarnation}".encode())
                one.connect(endpoint)
                frames = [bytes(4)] if isinstance(message, Block) else []
                sent = asyncio.ensure_future(one.send_multipart([*frames, encode(message, name)]))
                await until(lambda b=before: inside.refused > b)  # type: ignore[misc]
                sent.cancel()
            inside.links.to_coordinator(card_of(WORKER.name))  # whose answer nobody else gets
            await until(lambda: inside.heard, 5)
            assert not any([await one.poll(0) for one in made if one.type == zmq.DEALER])
            (row,) = inside.cluster.registry.rows()
            assert (row["id"], row["state"], len(inside.heard)) == (WORKER.name, "ready", 1)
            for counters in (inside.counters, inside.cluster.counters):
                assert counters.total("protocol_violations_total") == 0
                assert counters.total("late_messages_total") == 0
        finally:
            context.destroy(linger=0)
            await inside.close()

    uvloop.run(asyncio.wait_for(story(), 30))


def test_bytes_that_are_no_handshake_disturb_nobody() -> None:
    async def story() -> None:
        inside = Inside()
        try:
            await inside.register()
            garbage = (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(4096),
                b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(99),
            )
            ports = {parse_endpoint(endpoint).port for endpoint, *_ in doors(inside)}
            bare = [
                socket.create_connection(("127.0.0.1", port), 2) for port in ports if port for _ in range(30)
            ]
            for number, one in enumerate(bare):
                one.sendall(garbage[number % len(garbage)])
            inside.links.to_coordinator(card_of(WORKER.name))
            await until(lambda: inside.heard, 3)
            for one in bare:
                one.close()
            assert [row["id"] for row in inside.cluster.registry.rows()] == [WORKER.name]
            assert inside.cluster.counters.total("protocol_violations_total") == 0
        finally:
            await inside.close()

    uvloop.run(asyncio.wait_for(story(), 30))


def test_with_the_key_the_same_words_are_heard() -> None:
    """So what was said at the doors is what would have been taken."""

    async def story() -> None:
        inside, counters = Inside(), Counters()
        other = Links(PEER, counters, block_bytes=BLOCK_BYTES, key=OURS)
        try:
            await inside.register()
            other.bind(HERE)
            other.start(inside.control, lambda *_: None, lambda *_: None, lambda *_: None)
            other.to_coordinator(card_of(PEER.name))
            other.to_receiver(inside.address, Cancel(*ABOUT, "gone"))
            await until(lambda: inside.heard and len(inside.cluster.registry.rows()) == 2)
            assert inside.heard == [(Cancel(*ABOUT, "gone"), PEER)]
            assert inside.refused == 0
        finally:
            await other.close()
            await inside.close()

    uvloop.run(asyncio.wait_for(story(), 30))
