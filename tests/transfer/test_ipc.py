"""ipc between processes: a sender's death, what a receiver's door takes, and who has this channel at all. What moves is
tested in `test_channels_on_device.py`, whose hash decides in `tests/kernels/gpu/test_device_pool.py`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.counters import Counters
from common.errors import BadConfiguration
from common.messages import DevicePool as Hello, Mapped, Message, NotMapped, Segment, Sender
from common.request import Incarnation, WorkerId
from common.wire import decode, encode
from kernels.cache import CacheLayout, PagedCache
from kernels.gpu.device_pool import CudaPool
from kernels.shared_pool import CannotShare
from tests.kernels.gpu.host_driver import build
from tests.transfer import test_channels as contract
from tests.transfer.bare_pool import ON_DEVICE, BarePool, content_of
from tests.transfer.channel_ends import Giver, Taker, until
from tests.transfer.device_pool import DevicePool
from tests.transfer.pair import key
from transfer.channel import ReceivingEnd, SendingEnd
from transfer.door import DoorReceiving
from transfer.own_channels import receiving_ends, sending_ends
from transfer.segment import PoolSegment

BLOCK = 4096
D = Sender("decode-0", Incarnation(3))
P = Sender("prefill-0", Incarnation(7))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def on_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ON_DEVICE, str(library))


# ---------------------------------------------------------------- two processes


@pytest.fixture
def channel() -> str:
    return "ipc"


# A receiver's death is the door's affair alone, and tested over shm.
test_sender_dies = contract.test_a_sender_that_dies_leaves_no_mapping_and_its_next_life_is_heard


# ---------------------------------------------------------------- the receiver's door


@asynccontextmanager
async def door() -> AsyncIterator[tuple[DoorReceiving[Hello], Counters]]:
    counters, pool = Counters(), DevicePool(4, BLOCK)
    (end,) = pool.receiving("ipc", D, counters)
    assert isinstance(end, DoorReceiving)
    end.start()
    try:
        yield end, counters
    finally:
        await end.end()
        pool.close()


def hello_of(pool: DevicePool) -> Hello:
    shared = pool.on_device().shared()
    return Hello(
        WorkerId(D.name), D.incarnation, shared.size, BLOCK, shared.handle, shared.offset, shared.device
    )


async def knock(end: DoorReceiving[Hello], hello: Message, fds: list[int]) -> Message:
    """The answer; it is hung up afterwards where that is no."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + end.where)
        connection.setblocking(False)
        socket.send_fds(connection, [encode(hello, P)], fds)
        said = decode(await asyncio.wait_for(loop.sock_recv(connection, 4096), 5))[1]
        if isinstance(said, NotMapped):
            assert await asyncio.wait_for(loop.sock_recv(connection, 4096), 5) == b""
        return said


BAD: dict[str, tuple[Callable[[Hello], Message], int, str]] = {
    # what is wrong: what is sent instead, with how many descriptors, a word of the refusal
    "a memfd's message": (
        lambda good: Segment(WorkerId(D.name), D.incarnation, 4 * BLOCK, BLOCK),
        1,
        "one DevicePool",
    ),
    "a descriptor": (lambda good: good, 1, "one DevicePool"),
    "for another worker": (lambda good: replace(good, worker=WorkerId("x")), 0, "not x"),
    "for another life": (lambda good: replace(good, incarnation=Incarnation(2)), 0, "another life"),
    "other blocks": (lambda good: replace(good, block_bytes=8), 0, "4096 bytes here"),
    "a device not seen": (lambda good: replace(good, device=bytes(16)), 0, "does not see"),
    "a device out of reach": (lambda good: replace(good, device=b"host device no.2"), 0, "no peer access"),
    "a handle of nothing": (lambda good: replace(good, handle=bytes(64)), 0, "invalid resource handle"),
    "too large": (lambda good: replace(good, size=good.size + BLOCK), 0, "not in its allocation"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_a_good_pool_is_refused_and_counted_and_leaves_nothing_open(what: str) -> None:
    async def story() -> None:
        pool = DevicePool(4, BLOCK)
        spoil, descriptors, word = BAD[what]
        async with door() as (end, counters):
            before = contract.open_things()
            assert pool.segment.fd is not None
            said = await knock(end, spoil(hello_of(pool)), [pool.segment.fd] * descriptors)
            assert isinstance(said, NotMapped) and word in said.reason
            assert contract.open_things() == before and not end._guests
            assert counters.values == {"protocol_violations_total": 1.0}
            assert await knock(end, hello_of(pool), []) == Mapped(), "a good one is"
            await until(lambda: contract.open_things() == before)
        pool.close()

    asyncio.run(story())


# ---------------------------------------------------------------- who has it


def names(ends: Sequence[SendingEnd] | Sequence[ReceivingEnd]) -> list[str]:
    """And ends them."""
    for end in ends:
        asyncio.run(end.end())
    return [end.name for end in ends]


def test_pools_on_devices_prefer_it_and_pools_in_memory_have_not_heard_of_it() -> None:
    device, host = DevicePool(1, BLOCK), BarePool(1, BLOCK)
    assert names(device.sending("auto", P)) == ["ipc", "tcp"]
    assert names(device.receiving("auto", D, Counters())) == ["ipc", "shm", "tcp"]
    assert names(device.sending("ipc", P)) == names(device.receiving("ipc", D, Counters())) == ["ipc"]
    assert names(host.sending("auto", P)) == names(host.receiving("auto", D, Counters())) == ["shm", "tcp"]
    for ends in (
        lambda: host.sending("ipc", P),
        lambda: host.receiving("ipc", D, Counters()),
    ):
        with pytest.raises(BadConfiguration, match=r"--transfer ipc cannot be had: .*--device cuda"):
            ends()
    device.close()
    host.close()


def test_memory_without_a_handle_goes_without_it_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pool = DevicePool(1, BLOCK, can_be_shared=False)
    assert names(pool.sending("auto", P)) == ["tcp"]
    assert any("no ipc here" in line and "expandable_segments" in line for line in caplog.messages)
    with pytest.raises(BadConfiguration, match="expandable_segments"):
        pool.sending("ipc", P)
    pool.close()


def test_a_machine_without_a_driver_goes_without_it(caplog: pytest.LogCaptureFixture) -> None:
    """The pool is on torch's "meta" device: on no device there is."""
    caplog.set_level("INFO")
    cache = PagedCache(CacheLayout(1, 1, 64, 16, torch.float32), 2, "meta")
    assert names(sending_ends("auto", P, cache, PoolSegment(), cache.on_device)) == ["tcp"]
    assert any("no ipc here: no CUDA driver" in line for line in caplog.messages)
    with pytest.raises(BadConfiguration, match="no CUDA driver"):
        receiving_ends("ipc", D, Counters(), cache.block_bytes, cache.on_device)


def test_a_receiver_that_cannot_see_the_pool_is_reached_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(pool: CudaPool, uuid: bytes) -> None:
        raise CannotShare("its pool is on a device that this process does not see")

    monkeypatch.setattr(CudaPool, "_check_device", elsewhere)

    async def story() -> None:
        pool = DevicePool(3, BLOCK)
        pool.fill()
        giver, taker = Giver(pool, "auto"), Taker(DevicePool(8, BLOCK), "auto")
        giver.start()
        taker.start()
        giver.give(key(), [0, 1, 2], taker.address)
        await until(lambda: giver.sent)
        assert taker.content(key()) == [content_of(block, BLOCK) for block in range(3)]
        assert taker.verified_bytes == {"tcp": 3 * BLOCK}
        assert giver.counters.values == {'kv_channel_failures_total{channel="ipc"}': 1.0}
        await giver.close()
        await taker.close()

    asyncio.run(story())
