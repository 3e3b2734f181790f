"""shm alone: what a pool's segment allows and forbids, and what a receiver takes from whoever knocks."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import xxhash

import transfer.door
from common.counters import Counters
from common.messages import Block, Mapped, Message, NotMapped, PeerAddress, Segment, Sender
from common.request import Incarnation, WorkerId
from common.wire import decode, encode
from tests.transfer.bare_pool import BarePool
from tests.transfer.channel_ends import until
from tests.transfer.pair import key
from transfer.channel import store
from transfer.door import DoorReceiving, DoorSending
from transfer.own_channels import receiving_ends
from transfer.segment import CannotMap, PoolSegment, map_to_read

BLOCK = 4096
ENOUGH = 100
D = Sender("decode-0", Incarnation(3))
P = Sender("prefill-0", Incarnation(7))
HELLO = Segment(WorkerId("decode-0"), Incarnation(3), 4 * BLOCK, BLOCK)


# ---------------------------------------------------------------- the segment


def test_only_the_owner_can_ever_write_a_pool_and_nobody_can_cut_it() -> None:
    segment = PoolSegment()
    own = segment.allocate(BLOCK)
    assert own is not None and segment.fd is not None
    own[:5] = b"hello"
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, BLOCK, flags=mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 0)
    for size in (0, 2 * BLOCK):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    theirs = map_to_read(segment.fd, BLOCK)
    assert theirs[:5] == b"hello"
    with pytest.raises(TypeError):
        theirs[0] = 1
    own[:5] = b"later"
    assert theirs[:5] == b"later", "one memory, not a copy"
    theirs.close()
    own.close()
    segment.close()


def test_a_segment_that_could_be_cut_under_its_reader_is_not_mapped() -> None:
    bare = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, BLOCK)
    sealed = PoolSegment()
    memory = sealed.allocate(BLOCK)
    assert memory is not None and sealed.fd is not None
    try:
        with pytest.raises(CannotMap, match="not sealed"):
            map_to_read(bare, BLOCK)
        with pytest.raises(CannotMap, match=f"{BLOCK} bytes, not {2 * BLOCK}"):
            map_to_read(sealed.fd, 2 * BLOCK)
        with open("/dev/null", "rb") as file, pytest.raises(CannotMap):
            map_to_read(file.fileno(), BLOCK)
    finally:
        memory.close()
        sealed.close()
        os.close(bare)


def test_a_system_that_gives_no_segment_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    segment = PoolSegment()
    assert segment.allocate(BLOCK) is None and segment.fd is None
    assert segment.fault == "no memfd: Operation not permitted"


RESTLESS_WRITER = """
import mmap, sys, time
memory = mmap.mmap(int(sys.argv[1]), 0)
one, other = (bytes([byte]) * len(memory) for byte in (1, 2))
print(flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    memory[:] = other
    memory[:] = one
"""


@contextmanager
def writing(fd: int) -> Iterator[None]:
    command = [sys.executable, "-I", "-c", RESTLESS_WRITER, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            yield
        finally:
            writer.kill()


def test_BR_020_what_passes_is_what_was_announced_while_the_source_changes() -> None:
    """The copy is judged, not the source: another process writes that all the time."""
    size = 64 << 10
    fd = os.memfd_create("restless")
    os.ftruncate(fd, size)
    announced = bytes([1]) * size
    header = Block(*key(), index=0, part=0, checksum=xxhash.xxh3_64_intdigest(announced), size=size)
    pool, good, bad = BarePool(1, size), 0, 0
    with writing(fd), mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as source:
        deadline = time.monotonic() + 20
        while good < ENOUGH or bad < ENOUGH:  # on a busy machine the writer runs now and then
            assert time.monotonic() < deadline
            if store(pool, [(0, header, source)]) == [True]:
                good += 1
                same = pool.host_block(0) == announced
                assert same
            else:
                bad += 1
    pool.close()
    os.close(fd)


# ---------------------------------------------------------------- the receiver's door


@asynccontextmanager
async def door() -> AsyncIterator[tuple[DoorReceiving[Segment], Counters]]:
    counters = Counters()
    (end,) = receiving_ends("shm", D, counters, BLOCK)
    assert isinstance(end, DoorReceiving)
    end.start()
    try:
        yield end, counters
    finally:
        await end.end()


async def knock(end: DoorReceiving[Segment]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + end.where)
    connection.setblocking(False)
    return connection


async def answer(connection: socket.socket) -> Message | None:
    """None where it hung up."""
    data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), 5)
    return decode(data)[1] if data else None


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


BAD: dict[str, tuple[bytes, int, str]] = {
    # what is wrong: what is sent, with how many descriptors, a word of the refusal
    "garbage": (b"\x81junk", 1, "msgpack"),
    "another message": (encode(Mapped(), P), 1, "one Segment"),
    "no descriptor": (encode(HELLO, P), 0, "one Segment"),
    "two descriptors": (encode(HELLO, P), 2, "one Segment"),
    "for another worker": (encode(Segment(WorkerId("x"), D.incarnation, 4 * BLOCK, BLOCK), P), 1, "not x"),
    "for another life": (
        encode(Segment(HELLO.worker, Incarnation(2), 4 * BLOCK, BLOCK), P),
        1,
        "another life",
    ),
    "other blocks": (encode(Segment(HELLO.worker, D.incarnation, 4 * BLOCK, 8), P), 1, "4096 bytes here"),
    "another size": (encode(Segment(HELLO.worker, D.incarnation, 3 * BLOCK, BLOCK), P), 1, "bytes, not"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_a_good_segment_is_refused_and_counted_and_leaves_nothing_open(what: str) -> None:
    async def story() -> None:
        pool = BarePool(4, BLOCK)
        data, descriptors, word = BAD[what]
        async with door() as (end, counters):
            before = open_fds()
            connection = await knock(end)
            assert pool.segment.fd is not None
            socket.send_fds(connection, [data], [pool.segment.fd] * descriptors)
            said = await answer(connection)
            assert isinstance(said, NotMapped) and word in said.reason
            assert await answer(connection) is None, "hung up"
            connection.close()
            assert open_fds() == before and counters.values == {"protocol_violations_total": 1.0}
        pool.close()

    asyncio.run(story())


def test_who_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.door, "ANSWER_S", 0.1)

    async def story() -> None:
        async with door() as (end, _):
            connection = await knock(end)
            assert await answer(connection) is None
            connection.close()

    asyncio.run(story())


def test_another_users_process_gets_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does it hand its pool in, nor is it shown one."""

    async def story() -> None:
        pool = BarePool(4, BLOCK)
        (sending,) = pool.sending("shm", P)
        assert isinstance(sending, DoorSending)
        async with door() as (end, counters):
            monkeypatch.setattr(transfer.door, "_user_of", lambda connection: os.geteuid() + 1)
            connection = await knock(end)
            assert await answer(connection) is None and counters.values == {"protocol_violations_total": 1.0}
            connection.close()
            heard: list[str] = []
            sending.open(address_at(end.where), lambda: heard.append("opened"), heard.append)
            assert heard == ["cannot reach it: it belongs to another user"]
        pool.close()

    asyncio.run(story())


def test_a_crowd_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.door, "MAX_SENDERS", 3)

    async def story() -> None:
        async with door() as (end, _):
            connections = [await knock(end) for _ in range(4)]
            assert await answer(connections[3]) is None
            assert len(end._guests) == 3
            for connection in connections:
                connection.close()
            await until(lambda: not end._guests)

    asyncio.run(story())


def test_a_second_segment_of_one_sender_takes_the_place_of_the_first() -> None:
    async def story() -> None:
        pool = BarePool(4, BLOCK)
        assert pool.segment.fd is not None
        async with door() as (end, _):
            connections = []
            for _ in range(2):
                connections.append(await knock(end))
                socket.send_fds(connections[-1], [encode(HELLO, P)], [pool.segment.fd])
                assert await answer(connections[-1]) == Mapped()
            assert await answer(connections[0]) is None, "hung up"
            assert list(end._in_view) == [P] and len(end._guests) == 1
            connections[1].send(b"what else")
            assert isinstance(await answer(connections[1]), NotMapped)
            assert end._in_view == {} and end._guests == []
            for connection in connections:
                connection.close()
        pool.close()

    asyncio.run(story())


def address_at(where: str) -> PeerAddress:
    return PeerAddress(HELLO.worker, D.incarnation, "tcp://h:1", "tcp://h:2", {"shm": where})
