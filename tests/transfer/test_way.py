"""Which channel two workers take, what happens when it is lost, and what is said when there is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

import transfer.door
import transfer.shm
from common.errors import BadConfiguration
from common.messages import Sender
from common.request import Incarnation
from tests.transfer.bare_pool import BarePool, content_of
from tests.transfer.channel_ends import Giver, Taker, until
from tests.transfer.pair import key
from transfer.own_channels import sending_ends
from transfer.segment import CannotMap, PoolSegment

BLOCK = 4096
R = key()


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 30))


@asynccontextmanager
async def ends(giving: str, taking: str) -> AsyncIterator[tuple[Giver, Taker]]:
    pool = BarePool(8, BLOCK)
    pool.fill()
    giver, taker = Giver(pool, giving, retry_s=0.2), Taker(BarePool(64, BLOCK), taking)
    giver.start()
    taker.start()
    try:
        yield giver, taker
    finally:
        await giver.close()
        await taker.close()


async def arrives(giver: Giver, taker: Taker, name: str) -> None:
    which = key(name)
    giver.give(which, [0, 1, 2], taker.address)
    await until(lambda: which in giver.sent)
    assert taker.content(which) == [content_of(block, BLOCK) for block in range(3)]


@pytest.mark.parametrize(
    "giving, taking, taken",
    [
        ("auto", "auto", "shm"),
        ("auto", "shm", "shm"),
        ("shm", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
    ],
)
def test_two_workers_take_the_first_that_both_offer(
    giving: str, taking: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first block on, and both say so."""
    caplog.set_level("INFO")

    async def story() -> None:
        async with ends(giving, taking) as (giver, taker):
            for number in range(3):
                await arrives(giver, taker, f"r{number}")
            assert taker.verified_bytes == {taken: 9 * BLOCK} and taker.refused == 0
            assert "kv_channel_failures_total" not in str(giver.counters.values)

    run(story())
    said = [record.message for record in caplog.records]
    assert said.count(f"KV to decode-0 goes over {taken}") == 1
    assert sum("KV from prefill-0 comes over shm" in line for line in said) == (taken == "shm")


@pytest.mark.parametrize("giving, taking", [("shm", "tcp"), ("tcp", "shm")])
def test_two_workers_without_a_channel_in_common_say_so_at_once(giving: str, taking: str) -> None:
    async def story() -> None:
        async with ends(giving, taking) as (giver, taker):
            for number in range(2):
                giver.give(key(f"r{number}"), [0], taker.address)
                await until(lambda n=number: len(giver.failed) > n, 1.0)  # type: ignore[misc]
            assert giver.failed[0] == (
                f"refused by decode-0: no KV can go there: it takes {taking}, we send over {giving}"
            )
            await until(lambda: giver.sender.settled)

    run(story())


def test_a_pool_that_cannot_be_mapped_goes_over_tcp_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(fd: int, size: int) -> None:
        raise CannotMap("its pool cannot be mapped: out of memory")

    monkeypatch.setattr(transfer.shm, "map_to_read", forbidden)

    async def story() -> None:
        async with ends("auto", "auto") as (giver, taker):
            for number in range(3):
                await arrives(giver, taker, f"r{number}")
            assert taker.verified_bytes == {"tcp": 9 * BLOCK}
            assert giver.counters.values == {'kv_channel_failures_total{channel="shm"}': 1.0}

    run(story())
    said = [record.message for record in caplog.records if record.name == "transfer.way"]
    assert said == ["shm to decode-0 cannot be had: refused: its pool cannot be mapped: out of memory"]


def test_a_receiver_that_does_not_answer_its_door_is_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer.door, "ANSWER_S", 0.2)

    async def story() -> None:
        async with ends("auto", "auto") as (giver, taker):
            deaf = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            deaf.bind("\0kvferry-test-deaf")
            deaf.listen()
            taker.address.channels["shm"] = "kvferry-test-deaf"
            await arrives(giver, taker, "r")
            assert taker.verified_bytes == {"tcp": 3 * BLOCK}
            deaf.close()

    run(story())


def test_a_channel_that_is_lost_is_left_for_the_next_one() -> None:
    """Blocks that were announced over it and not read are asked for again, and come over the other."""

    async def story() -> None:
        async with ends("auto", "auto") as (giver, taker):
            await arrives(giver, taker, "before")
            shm = taker.links._receiving["shm"]
            assert isinstance(shm, transfer.door.DoorReceiving)
            giver.give(R, [3, 4, 5], taker.address)
            for guest in list(shm._guests):
                shm._leave(guest)
            await until(lambda: R in giver.sent)
            assert taker.content(R) == [content_of(block, BLOCK) for block in (3, 4, 5)]
            await arrives(giver, taker, "after")
            assert taker.verified_bytes["tcp"] >= 3 * BLOCK
            assert giver.counters.values['kv_channel_failures_total{channel="shm"}'] == 1.0

    run(story())


@pytest.mark.parametrize("who", ["we", "the peer"])
def test_who_leaves_in_order_is_nothing_to_warn_of(who: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        async with ends("shm", "shm") as (giver, taker):
            await arrives(giver, taker, "r")
            if who == "we":
                await giver.close()
                return
            shm = taker.links._receiving["shm"]
            assert isinstance(shm, transfer.door.DoorReceiving)
            for guest in list(shm._guests):
                shm._leave(guest)
            await until(lambda: any("shm to decode-0 is lost" in line for line in caplog.messages))

    run(story())
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


def test_a_silent_while_costs_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets are made anew; the connection that carries the mapping says by itself that the peer lives."""
    monkeypatch.setattr("transfer.links.UNANSWERED_S", 0.1)

    async def story() -> None:
        async with ends("shm", "shm") as (giver, taker):
            await arrives(giver, taker, "before")
            way = giver.links._ways[taker.address.worker]
            way.unanswered_since = 1.0
            shm = taker.links._receiving["shm"]
            assert isinstance(shm, transfer.door.DoorReceiving)
            asyncio.get_running_loop().remove_reader(shm._listener)  # nobody would answer the door
            await arrives(giver, taker, "after")
            assert giver.links._ways[taker.address.worker] is not way
            assert taker.verified_bytes == {"shm": 6 * BLOCK}
            assert giver.counters.values == {}

    run(story())


def test_shm_asked_for_by_name_where_it_cannot_be_is_an_error_and_auto_goes_without() -> None:
    pool = BarePool(1, BLOCK)
    nothing_made = PoolSegment()
    me = Sender("prefill-0", Incarnation(1))
    with pytest.raises(
        BadConfiguration, match="--transfer shm cannot be had: the pool is not in this host's"
    ):
        sending_ends("shm", me, pool, nothing_made)
    assert [end.name for end in sending_ends("auto", me, pool, nothing_made)] == ["tcp"]
    pool.close()
