"""A worker's sockets against real ones: frames arrive whole, and a stolen name is won back."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import xxhash
import zmq
import zmq.asyncio

import transfer.links
import transfer.presence
from common.counters import Counters
from common.endpoints import Endpoint
from common.messages import (
    Abort,
    Block,
    Cancel,
    Cancelled,
    Delivered,
    Drain,
    Message,
    PeerAddress,
    Refused,
    Sender,
)
from common.request import Attempt, Incarnation, RequestId, WorkerId
from common.wire import encode
from tests.transfer.bare_pool import BarePool
from tests.transfer.pair import offer_of
from transfer.channel import Arrived
from transfer.inbox import identity
from transfer.links import MAX_WAYS, Links, peer_of
from transfer.sockets import LINGER_MS, allow_open_files
from transfer.tcp import TcpReceiving, TcpSending

BLOCK_BYTES = 4096
KEY = (RequestId("a"), Attempt(1))
CANCEL = Cancel(*KEY, "x")
_NOWHERE = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


class End:
    """One worker's links and all that came in over them."""

    def __init__(self, name: str) -> None:
        self.me = Sender(name, Incarnation(1))
        self.pool = BarePool(4, BLOCK_BYTES)
        self.links = Links(
            self.me,
            Counters(),
            block_bytes=BLOCK_BYTES,
            sending=[TcpSending(self.pool)],
            receiving=[TcpReceiving()],
        )
        self.address = self.links.bind(Endpoint("127.0.0.1", None))
        self.heard: list[tuple[Message, str]] = []
        self.blocks: list[tuple[Block, bytes]] = []
        self.gone: list[str] = []

    def start(self, coordinator: str) -> None:
        def hear(message: Message, sender: Sender) -> None:
            self.heard.append((message, sender.name))

        def take(sender: Sender, came: Sequence[Arrived]) -> None:
            self.blocks += [(header, bytes(frame)) for header, frame in came if isinstance(frame, memoryview)]

        self.links.start(coordinator, hear, hear, take, self.gone.append)


async def until(true: Callable[[], Any], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def coordinator_and(*names: str) -> AsyncIterator[tuple[zmq.asyncio.Socket, str, list[End]]]:
    context = zmq.asyncio.Context()
    router: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    ends = [End(name) for name in names]
    for end in ends:
        end.start(endpoint)
    try:
        yield router, endpoint, ends
    finally:
        for end in ends:
            await end.links.close()
            end.pool.close()
        context.destroy(linger=0)


def run(story: Coroutine[Any, Any, None]) -> None:
    """Fails too where something raises that nobody waits for."""
    unheard: list[object] = []

    async def listening() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        await asyncio.wait_for(story, 30)
        gc.collect()

    asyncio.run(listening())
    assert unheard == []


async def take_over(endpoint: str, name: bytes, data: bytes) -> None:
    """An impostor comes under `name`, says something and leaves."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(endpoint)
    await socket.send(data)
    await asyncio.sleep(0.2)
    context.destroy(linger=0)
    await asyncio.sleep(0.1)


def test_messages_and_blocks_arrive_whole_and_answers_find_their_way() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            content = bytes(range(256)) * 16
            p.links.to_receiver(d.address, CANCEL)
            p.pool.write_block(2, content)
            p.links.send_blocks(d.address, [(KEY, 3, 2)])
            await until(lambda: d.heard and d.blocks)
            assert d.heard == [(CANCEL, "prefill-0")]
            ((header, frame),) = d.blocks
            assert frame == content and (header.index, header.size) == (3, BLOCK_BYTES)
            assert header.checksum == xxhash.xxh3_64_intdigest(content)
            d.links.to_sender(peer_of(p.me), Delivered(*KEY))
            await until(lambda: p.heard)
            assert p.heard == [(Delivered(*KEY), "decode-0")]

    run(story())


def test_either_end_may_call_a_transfer_off_and_is_answered() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: d.heard)
            for said in (Cancelled(*KEY), CANCEL):
                d.links.to_sender(peer_of(p.me), said)
            await until(lambda: len(p.heard) == 2)
            p.links.to_receiver(d.address, Cancelled(*KEY))
            await until(lambda: len(d.heard) == 2)
            assert [m for m, _ in d.heard] == [CANCEL, Cancelled(*KEY)]
            assert [m for m, _ in p.heard] == [Cancelled(*KEY), CANCEL]
            assert "protocol_violations_total" not in d.links._counters.values | p.links._counters.values

    run(story())


def test_a_name_taken_over_at_the_coordinator_is_won_back() -> None:
    async def story() -> None:
        async with coordinator_and("decode-0") as (router, endpoint, (d,)):
            d.links.to_coordinator(CANCEL)
            assert (await router.recv_multipart())[0] == identity(d.me)
            await take_over(endpoint, identity(d.me), b"junk")
            assert (await router.recv_multipart())[1] == b"junk"
            d.links.to_coordinator(CANCEL)
            assert not await router.poll(300), "the old connection leads nowhere, or the test shows nothing"
            d.links.reconnect_control()
            d.links.to_coordinator(CANCEL)
            assert await router.recv_multipart() == [identity(d.me), encode(CANCEL, d.me)]
            await router.send_multipart([identity(d.me), encode(Drain(1.0), Sender("c", Incarnation(1)))])
            await until(lambda: d.heard)

    run(story())


def test_a_name_taken_over_at_a_peer_is_won_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.links, "UNANSWERED_S", 0.3)

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: d.heard)
            d.links.to_sender(peer_of(p.me), Delivered(*KEY))
            await until(lambda: p.heard)
            await take_over(d.address.control, identity(p.me), b"junk")
            p.links.to_receiver(d.address, CANCEL)
            await asyncio.sleep(0.4)
            assert len(d.heard) == 1, "the old connection leads nowhere, or the test shows nothing"
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: len(d.heard) == 2)

    run(story())


def test_another_life_of_a_peer_gets_a_connection_of_its_own() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0", "decode-1") as (_, _, (p, old, new)):
            p.links.to_receiver(old.address, CANCEL)
            await until(lambda: old.heard)
            moved = PeerAddress(old.address.worker, Incarnation(2), new.address.control, new.address.data)
            p.links.to_receiver(moved, CANCEL)
            await until(lambda: new.heard)

    run(story())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_BR_043_a_peer_that_is_gone_leaves_no_socket_behind() -> None:
    """It is noticed without a word to it, and what is said to it afterwards costs sockets for a moment only."""

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.to_receiver(d.address, CANCEL)  # what is loaded on first use is loaded
            await until(lambda: d.heard)
            before = open_files()
            async with coordinator_and("decode-1") as (_, _, (other,)):
                p.links.to_receiver(other.address, CANCEL)
                await until(lambda: other.heard)
            await until(lambda: p.gone == ["decode-1"])
            await until(lambda: open_files() <= before)
            p.links.to_receiver(other.address, CANCEL)
            await until(lambda: p.gone == ["decode-1", "decode-1"])
            await until(lambda: open_files() <= before)
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: len(d.heard) == 2)
            assert list(p.links._ways) == ["decode-0"]

    run(story())


def test_BR_029_who_listens_nowhere_is_gone_within_a_second() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            await d.links.close()
            began = time.monotonic()
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: p.gone)
            assert time.monotonic() - began < 2.0  # 0.6 to 0.9 s on a machine of our own

    run(story())


def test_BR_032_who_takes_the_connection_and_says_nothing_is_gone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was stopped, or died behind a gateway: the kernel still takes connections for it."""
    monkeypatch.setattr(transfer.presence, "GONE_AFTER_S", 0.3)

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            with socket.create_server(("127.0.0.1", 0)) as deaf:
                where = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
                p.links.to_receiver(replace(d.address, control=where), CANCEL)
                await until(lambda: p.gone)

    run(story())


KEYED_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)
"""ZMTP 3.1: with whom only CURVE will do. A real socket says the same and hangs up; whether its last words are read
before that is known is a race, in which a caller that loses calls again."""


def test_a_peer_whose_data_socket_turns_us_away_is_gone_though_it_hears_us() -> None:
    """ZeroMQ does not call there again: blocks would be lost one and all, and the words about them be answered."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(KEYED_GREETING)
        await reader.read()  # to the end of the call
        writer.close()

    async def story() -> None:
        async with (
            coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)),
            await asyncio.start_server(greet, "127.0.0.1", 0) as keyed,
        ):
            port = keyed.sockets[0].getsockname()[1]
            p.links.to_receiver(replace(d.address, data=f"tcp://127.0.0.1:{port}"), CANCEL)
            await until(lambda: p.gone == ["decode-0"], 20.0)

    run(story())


def test_links_that_lead_nowhere_hold_up_no_end() -> None:
    """The coordinator is gone, and one of two peers: nothing unsent is waited for."""

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (router, _, (p, d)):
            p.links.to_receiver(d.address, CANCEL)
            p.links.to_coordinator(CANCEL)
            await until(lambda: d.heard)
            await router.recv_multipart()
            router.close(linger=0)
            await d.links.close()
            await asyncio.sleep(0.2)
            p.links.to_coordinator(CANCEL)
            p.links.to_receiver(d.address, CANCEL)
            began = time.monotonic()
            await p.links.close()
            assert time.monotonic() - began < 0.9e-3 * LINGER_MS

    run(story())


def test_garbage_on_every_socket_is_counted_and_nothing_else() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            context = zmq.asyncio.Context()
            sockets = [context.socket(zmq.DEALER), context.socket(zmq.PUSH)]
            for socket, endpoint in zip(sockets, (d.address.control, d.address.data), strict=True):
                socket.connect(endpoint)
                await socket.send(b"\x81junk")
                await socket.send_multipart([b"a", b"b", b"c"])
            counted = d.links._counters.values
            await until(lambda: counted.get("protocol_violations_total", 0) >= 4)
            context.destroy(linger=0)
            p.links.to_receiver(d.address, CANCEL)
            await until(lambda: d.heard)
            assert d.heard == [(CANCEL, "prefill-0")]

    run(story())


def test_commands_and_answers_are_taken_from_where_they_belong_only() -> None:
    """On the socket for peers nobody commands; and another life of a sender, or another peer, is another one."""

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0", "decode-1") as (_, _, (p, d, other)):
            context = zmq.asyncio.Context()
            twin = Sender("prefill-0", Incarnation(2))
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity(twin))
            socket.connect(d.address.control)
            await socket.send(encode(Abort(*KEY, "a stranger's wish"), twin))
            await socket.send(encode(CANCEL, twin))
            await until(lambda: d.heard)
            assert d.heard == [(CANCEL, "prefill-0")]
            assert d.links._counters.values["protocol_violations_total"] == 1
            assert peer_of(twin) != peer_of(p.me), "what one life of it began, another does not end"

            p.links.to_receiver(other.address, CANCEL)
            await until(lambda: other.heard)
            other.links.me = d.me  # it speaks as another
            other.links.to_sender(peer_of(p.me), Delivered(*KEY))
            await until(lambda: p.links._counters.values.get("protocol_violations_total"))
            assert p.heard == []
            context.destroy(linger=0)

    run(story())


def test_a_peer_whose_address_is_none_is_refused_at_once() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0") as (_, _, (p,)):
            nowhere = PeerAddress(WorkerId("x"), Incarnation(1), "tcp://127.0.0.1:1", "tcp://*:5")
            offer = offer_of(KEY, 1)
            p.links.to_receiver(nowhere, offer)
            await until(lambda: p.heard)
            assert isinstance(p.heard[0][0], Refused) and p.links._ways == {}

    run(story())


def test_ways_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.links, "MAX_WAYS", 3)

    async def story() -> None:
        async with coordinator_and("prefill-0") as (_, _, (p,)):
            for number in range(10):
                name = WorkerId(f"d{number}")
                target = PeerAddress(name, Incarnation(1), *_NOWHERE)
                p.links.to_receiver(target, CANCEL)
            assert list(p.links._ways) == ["d7", "d8", "d9"]

    run(story())


def test_as_many_ways_as_are_kept_can_be_had() -> None:
    """ZeroMQ has a limit of sockets of its own, and those that watch the sockets of a way count in it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files()

    async def story() -> None:
        async with coordinator_and("prefill-0") as (_, _, (p,)):
            for number in range(MAX_WAYS + 1):
                name = WorkerId(f"d{number}")
                p.links.to_receiver(PeerAddress(name, Incarnation(1), *_NOWHERE), CANCEL)
            assert len(p.links._ways) == MAX_WAYS
            assert "unsent_messages_total" not in {n.split("{")[0] for n in p.links._counters.values}

    try:
        run(story())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_block_for_a_peer_that_no_socket_leads_to_is_counted_as_lost() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0") as (_, _, (p,)):
            nowhere = PeerAddress(WorkerId("x"), Incarnation(1), "tcp://127.0.0.1:1", "tcp://*:5")
            p.links.send_blocks(nowhere, [(KEY, 0, 0)])
            assert p.links._counters.values['unsent_messages_total{kind="Block"}'] == 1

    run(story())


def test_a_link_that_is_never_empty_leaves_the_loop_its_turns() -> None:
    """Blocks come faster than they are taken; a timer beside them is late by a few turns, not by the whole queue."""

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            for _ in range(400):
                p.links.send_blocks(d.address, [(KEY, 3, 2)])
            await until(lambda: d.blocks)
            d.links._receiving["tcp"].take = lambda *block: time.sleep(0.002)  # type: ignore[method-assign]
            loop, late_s = asyncio.get_running_loop(), list[float]()
            for _ in range(10):
                began = loop.time()
                await asyncio.sleep(0.001)
                late_s.append(loop.time() - began - 0.001)
            assert median(late_s) < 0.1

    run(story())


def test_while_a_step_computes_blocks_take_a_share_of_the_time() -> None:
    """Reading rests for three turns after each, so the core and the interpreter are mostly the step's."""

    async def story() -> float:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            spent_s = 0.0

            def take(sender: Sender, came: Sequence[Arrived], deliver: object) -> None:
                nonlocal spent_s
                began = time.monotonic()
                time.sleep(0.001)
                spent_s += time.monotonic() - began  # more, where others want the core too

            d.links._receiving["tcp"].take = take  # type: ignore[method-assign]
            d.links.computing = lambda: True
            for _ in range(400):
                p.links.send_blocks(d.address, [(KEY, 3, 2)])
            await until(lambda: spent_s)
            spent_s, began = 0.0, time.monotonic()
            await asyncio.sleep(0.3)
            return spent_s / (time.monotonic() - began)

    share = asyncio.run(asyncio.wait_for(story(), 30))
    assert 0.01 < share < 0.45, share
