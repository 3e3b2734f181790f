"""Channels that are process groups: who may join, what a lost header costs, and peers that stop, die or say nothing.

With gloo, whose code nccl shares but for the group itself. What every channel has to do: `test_channels.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from common.errors import BadConfiguration
from common.group_messages import Join, NotJoined, Published
from common.messages import Block, Mapped, Message, PeerAddress, Sender
from common.request import Incarnation, WorkerId
from common.wire import decode, encode
from tests.transfer.bare_pool import BarePool, content_of
from tests.transfer.channel_ends import Giver, Taker, address_of, until
from tests.transfer.pair import key
from tests.transfer.test_channels import another, digest_of, open_things, vars_of, wanted
from transfer import group_receiving, group_sending, pair_thread, process_group
from transfer.channel import Arrived, Frame, Outbound, SendingEnd
from transfer.group_receiving import GroupReceiving
from transfer.own_channels import require_channel
from transfer.process_group import is_address
from transfer.rendezvous import Connection, connect, listen

BLOCK = 4096
LARGE = 256 << 10
MOVE_S = 1.0
OPEN_S = 0.8
R = key()
ME = Sender("prefill-0", Incarnation(1))
JOIN = Join(WorkerId("decode-0"), Incarnation(1), BLOCK, 5)


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 60))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "MOVE_LIMIT_S", MOVE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pair_thread, group_sending, group_receiving):
        monkeypatch.setattr(module, "OPEN_S", OPEN_S)


def group_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gloo ")]


def receiving(taker: Taker) -> GroupReceiving:
    (end,) = taker.links._receiving.values()
    assert isinstance(end, GroupReceiving)
    return end


@asynccontextmanager
async def giving(giver: Giver) -> AsyncIterator[Giver]:
    giver.pool.fill()
    giver.start()
    try:
        yield giver
    finally:
        await giver.close()


@asynccontextmanager
async def taking(taker: Taker) -> AsyncIterator[Taker]:
    taker.start()
    try:
        yield taker
    finally:
        await taker.close()


class Latest:
    """How late the loop was at worst: whoever waits in it for a group shows here."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._task = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.late_s = max(self.late_s, time.monotonic() - before)

    def end(self) -> float:
        self._task.cancel()
        return self.late_s


# ---------------------------------------------------------------- peers that stop


@pytest.mark.usefixtures("short")
def test_a_receiver_that_stops_amid_a_transfer_holds_no_thread_and_is_met_again() -> None:
    """Nor its sender when that leaves: the thread is inside gloo until the limit, and then lets the pool go."""

    async def story() -> None:
        giver = Giver(BarePool(32, LARGE), "gloo", timeout_s=3.0, retry_s=0.3)
        fast = Taker(BarePool(64, LARGE), "gloo", name="decode-1")
        with another("take", "decode-0", 1, "gloo", 97, LARGE) as slow:
            target = address_of((await slow.say())["address"])
            async with giving(giver), taking(fast):
                for each in (target, fast.address):
                    giver.give(key(f"warm {each.worker}"), [0], each)
                await until(lambda: len(giver.sent) == 2)
                await slow.say()
                latest = Latest()
                slow.signal(signal.SIGSTOP)
                giver.links.send_blocks(target, [(R, index, index) for index in range(32)])
                giver.give(key("slow"), list(range(32)), target)
                giver.give(key("fast"), list(range(32)), fast.address)
                await until(lambda: key("fast") in giver.sent)
                assert "gloo to decode-0" in group_threads(), "nothing was stuck"
                await until(lambda: giver.failed)
                assert "gloo was lost: Timed out" in giver.failed[0]
                await until(lambda: "gloo to decode-0" not in group_threads(), 1.0)
                giver.give(key("fast again"), [3], fast.address)
                await until(lambda: key("fast again") in giver.sent)
                assert latest.end() < 0.8 * MOVE_S, "the loop waited for a group"
                slow.signal(signal.SIGCONT)
                await until(lambda: giver.sender.settled)
                giver.give(key("slow again"), list(range(32)), target)
                await until(lambda: key("slow again") in giver.sent)
                assert (await slow.say())["digest"] == digest_of(list(range(32)), LARGE)
                slow.signal(signal.SIGSTOP)
                giver.links.send_blocks(target, [(R, index, index) for index in range(32)])
                began = time.monotonic()
            assert time.monotonic() - began < MOVE_S + 1.0
            assert group_threads() == []

    run(story())


@pytest.mark.usefixtures("short")
def test_a_sender_that_stops_amid_a_transfer_holds_no_thread_and_another_is_served() -> None:
    async def story() -> None:
        async with taking(Taker(BarePool(4096, LARGE >> 2), "gloo", timeout_s=1.0)) as taker:
            end = receiving(taker)
            before = open_things()
            with another("give", 1, "gloo", 64, LARGE >> 2, json.dumps(vars_of(taker.address))) as first:
                await first.say()
                latest = Latest()
                while not any(guest.waiting for guest in end._guests):  # it stopped between two transfers
                    first.signal(signal.SIGCONT)
                    await asyncio.sleep(0.02)
                    first.signal(signal.SIGSTOP)
                    await asyncio.sleep(0.1)
                await until(lambda: not end._guests and not group_threads(), MOVE_S + 2.0)
                await until(lambda: not taker.receiving.held, 5.0)
                assert latest.end() < 0.8 * MOVE_S, "the loop waited for a group"
                second = Giver(BarePool(64, LARGE >> 2), "gloo", incarnation=2)
                async with giving(second):
                    second.give(R, list(range(64)), taker.address)
                    await until(lambda: second.sent)
                    assert taker.content(R) == wanted(list(range(64)), LARGE >> 2)
            await until(lambda: open_things() == before, 3.0)

    run(story())


# ---------------------------------------------------------------- headers and blocks


class Forgetful:
    """A sending end whose headers do not all reach the data socket; their blocks are in the group all the same."""

    def __init__(self, end: SendingEnd) -> None:
        self._end = end
        self.name = end.name
        self.open, self.close, self.end = end.open, end.close, end.end
        self._packed = 0

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        packed = self._end.pack(target, blocks)
        self._packed += len(packed)
        if self._packed > 23:
            return packed  # those that were asked for again
        return [] if self._packed == len(packed) else packed[self._packed % 2 :]


def test_a_block_whose_header_is_lost_is_passed_over_and_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        giver = Giver(BarePool(23, BLOCK), "gloo", wrap=Forgetful)
        async with giving(giver), taking(Taker(BarePool(64, BLOCK), "gloo")) as taker:
            giver.give(R, list(range(23)), taker.address)
            await until(lambda: giver.sent)
            assert taker.content(R) == wanted(list(range(23)))
            assert taker.refused == 0, "a block came under another's header"
            assert "kv_channel_failures_total" not in str(giver.counters.values)

    run(story())
    assert [record.message for record in caplog.records].count("KV from prefill-0 comes over gloo") == 1


def test_headers_of_an_earlier_group_or_of_nobody_bring_nothing() -> None:
    async def story() -> None:
        giver = Giver(BarePool(4, BLOCK), "gloo")
        async with giving(giver), taking(Taker(BarePool(4, BLOCK), "gloo")) as taker:
            giver.give(R, [1], taker.address)
            await until(lambda: giver.sent)
            heard: list[tuple[int, int]] = []

            def hear(_: Sender, came: Sequence[Arrived]) -> None:
                heard.extend((header.index, len(source)) for header, source in came)

            end = receiving(taker)
            (guest,) = end._guests
            old = Block(*R, index=7, part=0, checksum=1, size=BLOCK, channel="gloo", offset=guest.next - 1)
            far = replace(old, index=8, offset=guest.next + 100_000)
            end.take(giver.me, [(old, memoryview(b"")), (far, memoryview(b""))], hear)
            end.take(Sender("nobody", Incarnation(1)), [(replace(old, index=9), memoryview(b""))], hear)
            assert heard == [(7, 0), (8, 0), (9, 0)] and guest.waiting == 0
            giver.give(key("next"), [2], taker.address)
            await until(lambda: key("next") in giver.sent)
            assert taker.content(key("next")) == [content_of(2, BLOCK)]

    run(story())


# ---------------------------------------------------------------- joining


def framed(message: Message) -> bytes:
    data = encode(message, ME)
    return len(data).to_bytes(4, "big") + data


def address(name: bytes = b"vm", family: int = socket.AF_INET) -> bytes:
    """As gloo publishes it."""
    where = family.to_bytes(2, sys.byteorder) + bytes(134)
    return struct.pack("=Q", len(name)) + name + struct.pack("=Q", len(where)) + where + bytes(16)


NO_ADDRESS = [
    b"",
    bytes(7),
    bytes(170),
    address()[:40],
    address()[:-8],
    address() + bytes(8),
    struct.pack("=Q", 1 << 63) + address()[8:] + bytes(3),
    address(name=b"vm1", family=99),
]

STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "no message": b"\0\0\0\2\xc1\xc1",
    "another message": framed(Mapped()),
    "another worker": framed(replace(JOIN, worker=WorkerId("decode-1"))),
    "another life": framed(replace(JOIN, incarnation=Incarnation(2))),
    "other blocks": framed(replace(JOIN, block_bytes=2 * BLOCK)),
}


def test_who_cannot_join_is_told_why_and_counted() -> None:
    async def story() -> None:
        async with taking(Taker(BarePool(4, BLOCK), "gloo")) as taker:
            end = receiving(taker)
            for number, (what, said) in enumerate(STRANGERS.items(), 1):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(end.where))
                writer.write(said)
                try:
                    answer = await asyncio.wait_for(reader.read(), 2.0)
                except ConnectionResetError:  # what it said was not even read to its end
                    assert what == "garbage"
                else:
                    _, message = decode(answer[4:])
                    assert isinstance(message, NotJoined) and message.reason, what
                await until(lambda: not end._guests, 1.0)
                assert taker.counters.values["protocol_violations_total"] == number, what
                writer.close()
            await until(lambda: not group_threads(), 1.0)
            giver = Giver(BarePool(4, BLOCK), "gloo")
            async with giving(giver):
                giver.give(R, [1], taker.address)
                await until(lambda: giver.sent)

    run(story())


@pytest.mark.parametrize(
    "after",
    [Mapped(), JOIN, Published("k" * 2000, b""), *(Published("0/1", each) for each in NO_ADDRESS)],
    ids=["another message", "joins again", "too long a key", *(f"{len(each)} bytes" for each in NO_ADDRESS)],
)
def test_who_joins_and_then_says_what_is_no_key_is_let_go(after: Message) -> None:
    """Nobody else notices."""

    async def story() -> None:
        async with taking(Taker(BarePool(4, BLOCK), "gloo")) as taker:
            end = receiving(taker)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(end.where))
            writer.write(framed(JOIN) + framed(after))
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), OPEN_S)
            writer.close()
            await until(lambda: not end._guests and not group_threads(), 1.0)
            giver = Giver(BarePool(4, BLOCK), "gloo")
            async with giving(giver):
                giver.give(R, [1], taker.address)
                await until(lambda: giver.sent)

    run(story())


def test_what_gloo_publishes_is_an_address() -> None:
    """The tests of whole transfers show it too; this one names the two lengths that differ."""
    for name in (b"", b"vm", b"a-longer-name.example"):
        assert is_address(address(name)) and is_address(address(name, socket.AF_INET6))
    assert not any(is_address(each) for each in NO_ADDRESS)


def test_who_listens_on_every_address_answers_with_the_one_that_it_was_reached_at() -> None:
    with listen("") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "127.0.0.2", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            there = connect(host, port, ME, time.monotonic() + 1.0)
            accepted, _ = listener.accept()
            here = Connection(accepted, ME, time.monotonic() + 1.0)
            assert here.own_host == host
            here.close()
            there.close()


@pytest.mark.usefixtures("impatient")
def test_who_joins_and_says_no_more_is_let_go() -> None:
    """At once where it hangs up, else after OPEN_S; those who come meanwhile are served."""

    async def story() -> None:
        async with taking(Taker(BarePool(4, BLOCK), "gloo")) as taker:
            end = receiving(taker)
            before = open_things()
            silent = [socket.create_connection(("127.0.0.1", int(end.where))) for _ in range(2)]
            silent[1].sendall(framed(JOIN))
            leaving = socket.create_connection(("127.0.0.1", int(end.where)))
            leaving.sendall(framed(JOIN))
            await until(lambda: len(end._guests) == 3, 1.0)
            leaving.close()
            await until(lambda: len(end._guests) == 2, 1.0)
            giver = Giver(BarePool(4, BLOCK), "gloo")
            async with giving(giver):
                giver.give(R, [1], taker.address)
                await until(lambda: giver.sent, 1.0)
            await until(lambda: not end._guests and not group_threads(), OPEN_S + 1.0)
            for each in silent:
                each.close()
            assert "protocol_violations_total" not in taker.counters.values
            await until(lambda: open_things() == before, 1.0)

    run(story())


@pytest.mark.usefixtures("impatient")
def test_a_receiver_that_cannot_be_joined_is_refused_in_words() -> None:
    async def story() -> None:
        deaf = socket.create_server(("127.0.0.1", 0))
        nobody = socket.create_server(("127.0.0.1", 0))
        nobody_port = nobody.getsockname()[1]
        nobody.close()
        giver = Giver(BarePool(4, BLOCK), "gloo", retry_s=5.0)
        async with giving(giver), taking(Taker(BarePool(4, 2 * BLOCK), "gloo")) as taker:
            for where, why in (
                (receiving(taker).where, f"refused: blocks have {2 * BLOCK} bytes here and {BLOCK} there"),
                (str(nobody_port), "cannot reach it: Connection refused"),
                ("tcp://x", "its address names no port"),
                (str(deaf.getsockname()[1]), f"no answer within {OPEN_S:g} s"),
            ):
                target = replace(taker.address, channels={"gloo": where})
                failures = len(giver.failed)
                giver.give(key(where), [0], target)
                await until(lambda n=failures: len(giver.failed) > n, OPEN_S + 1.0)  # type: ignore[misc]
                assert giver.failed[-1] == f"refused by decode-0: no KV can go there: gloo: {why}"
            await until(lambda: not group_threads(), 1.0)
        deaf.close()

    run(story())


# ---------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_nccl_without_a_gpu_is_refused_before_a_model_is_loaded(device: str) -> None:
    with pytest.raises(BadConfiguration, match=r"--transfer nccl cannot be had: .*; use auto, shm or tcp"):
        require_channel("nccl", device)


@pytest.mark.parametrize("channel", ["auto", "tcp", "shm", "gloo"])
def test_nothing_is_known_against_the_others(channel: str) -> None:
    require_channel(channel, "cpu")
