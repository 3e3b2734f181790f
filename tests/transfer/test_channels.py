"""The contract of a channel, the same tests for each: bytes arrive whole or not at all, whatever else happens.

Both ends are real (`channel_ends.py`), in this process or, where one must be stopped or killed, in one of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
import xxhash

from common.messages import Block, PeerAddress
from common.request import Key
from tests.transfer.bare_pool import CHANNELS, BarePool, content_of, new_pool
from tests.transfer.channel_ends import KEY_FILE, Giver, Taker, address_of, until
from tests.transfer.pair import handover_of, key, offer_of
from transfer.channel import Frame, Outbound, SendingEnd
from transfer.cluster_key import new_key

ROOT = Path(__file__).parents[2]
SMALL = 4096
LARGE = 128 << 10  # beyond what a socket copies in any case
R = key()

WITH_A_KEY = [("tcp", True)]
"""shm's bytes pass no socket, gloo's none of ours: with the cluster's key they are what they are without."""

IN_VIEW = ("shm", "ipc")
"""The receiver maps the sender's pool."""

pytestmark = pytest.mark.parametrize(
    ("channel", "keyed"),
    [*((name, False) for name in CHANNELS), *WITH_A_KEY],
    indirect=["keyed"],
    ids=[*CHANNELS, "tcp-CURVE"],
)


@pytest.fixture(autouse=True)
def keyed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        new_key(tmp_path / "key")
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))


def run(story: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(story, 60))


@asynccontextmanager
async def two_ends(
    channel: str, num_blocks: int, block_bytes: int = SMALL, **giving: Any
) -> AsyncIterator[tuple[Giver, Taker]]:
    """A giver whose pool is full of known bytes, and a taker."""
    pool = new_pool(num_blocks, block_bytes)
    pool.fill()
    giver, taker = Giver(pool, channel, **giving), Taker(new_pool(num_blocks, block_bytes), channel)
    giver.start()
    taker.start()
    try:
        yield giver, taker
    finally:
        await giver.close()
        await taker.close()


def wanted(blocks: list[int], block_bytes: int = SMALL, what: str = "") -> list[bytes]:
    return [content_of(block, block_bytes, what) for block in blocks]


# ---------------------------------------------------------------- bytes


def test_blocks_arrive_whole_and_in_their_places(channel: str) -> None:
    async def story() -> None:
        async with two_ends(channel, 6) as (giver, taker):
            giver.give(R, [4, 0, 5], taker.address)
            await until(lambda: giver.sent)
            assert taker.content(R) == wanted([4, 0, 5])
            assert taker.verified_bytes == {channel: 3 * SMALL} and taker.refused == 0
            assert giver.sender.settled and taker.receiving.receiver.settled

    async def and_leave_nothing() -> None:
        before = open_things()
        for _ in range(3):
            await story()
        assert open_things() == before

    run(story())  # opens what stays open for the process's whole life
    run(and_leave_nothing())


class Watched:
    """A sending end that is another one, but for what happens before a block is packed and to its frame after."""

    def __init__(
        self, end: SendingEnd, before: Callable[[int], None], after: Callable[[int, Frame], Frame]
    ) -> None:
        self._end = end
        self._before = before
        self._after = after
        self.name = end.name

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        self._end.open(target, opened, failed)

    def close(self, target: PeerAddress) -> None:
        self._end.close(target)

    async def end(self) -> None:
        await self._end.end()

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        for _, _, block in blocks:
            self._before(block)
        packed = self._end.pack(target, blocks)
        return [
            (header, self._after(block, frame))
            for (_, _, block), (header, frame) in zip(blocks, packed, strict=True)
        ]


def spoiling(pool: BarePool, times: int) -> Callable[[SendingEnd], SendingEnd]:
    """A bit of each block turns over on its way, the first `times` it is sent."""
    sent: dict[int, int] = {}

    def mend(block: int) -> None:
        pool.write_block(block, content_of(block, SMALL))

    def spoil(block: int, frame: Frame) -> Frame:
        sent[block] = sent.get(block, 0) + 1
        if sent[block] <= times:
            pool.host_block(block)[block] ^= 1
        return bytes(pool.host_block(block)) if frame else frame

    return lambda end: Watched(end, mend, spoil)


@pytest.mark.parametrize("times, arrives", [(1, True), (2, True), (3, False)])
def test_spoilt_bytes_are_refused_and_asked_for_again_twice(channel: str, times: int, arrives: bool) -> None:
    async def story() -> None:
        pool = new_pool(4, SMALL)
        giver = Giver(pool, channel, wrap=spoiling(pool, times))
        taker = Taker(new_pool(4, SMALL), channel)
        giver.start()
        taker.start()
        try:
            giver.give(R, [0, 1, 2, 3], taker.address)
            await until(lambda: giver.events)
            if arrives:
                assert giver.sent == [R] and taker.content(R) == wanted([0, 1, 2, 3])
                assert taker.refused == 4 * times
                assert taker.verified_bytes == {channel: 4 * SMALL}, "what was refused is not counted"
            else:
                assert "did not arrive" in giver.failed[0] and not taker.has(R)
                await until(lambda: not taker.receiving.held and giver.sender.settled)
        finally:
            await giver.close()
            await taker.close()

    run(story())


def test_BR_020_what_is_written_after_a_block_was_sent_never_arrives(channel: str) -> None:
    """Transfers are cancelled with their blocks on the way, and these are another request's at once."""

    async def story() -> None:
        pool, passed = new_pool(8, LARGE), set[bytes]()
        to_cancel: list[Key] = []

        def cancel() -> None:
            giver.cancel(to_cancel.pop())
            pool.fill("somebody else's")

        def cancelled(block: int, frame: Frame) -> Frame:
            if block == 5 and to_cancel:
                asyncio.get_running_loop().call_soon(cancel)
            return frame

        giver = Giver(pool, channel, wrap=lambda end: Watched(end, lambda block: None, cancelled))
        taker = Taker(new_pool(256, LARGE), channel)
        taker.on_filled = lambda block: passed.add(bytes(taker.pool.host_block(block)))
        giver.start()
        taker.start()
        try:
            for number in range(20):
                pool.fill()
                to_cancel.append(key(f"r{number}"))
                giver.give(to_cancel[0], list(range(8)), taker.address)
                await until(lambda: not to_cancel)
                await until(lambda: giver.sender.settled and not taker.receiving.held)
            assert passed <= set(wanted(list(range(8)), LARGE))
            assert all(
                taker.content(which) == wanted(list(range(8)), LARGE) for which in taker.receiving.done
            )
            after_the_cancel = taker.late if channel == "gloo" else 0  # its blocks take longer than a message
            assert taker.refused or after_the_cancel or channel == "tcp", "not in time: this shows nothing"
            giver.give(R, [0, 5], taker.address)
            await until(lambda: giver.sent)
            assert taker.content(R) == wanted([0, 5], LARGE, what="somebody else's")
        finally:
            await giver.close()
            await taker.close()

    run(story())


def test_BR_018_a_late_writer_cannot_touch_a_block(channel: str) -> None:
    async def story() -> None:
        async with two_ends(channel, 4) as (giver, taker):
            giver.give(R, [0, 1], taker.address)
            await until(lambda: giver.sent)
            giver.pool.fill("late")
            before = bytes(taker.pool.host_block(0)) + bytes(taker.pool.host_block(1))
            for which in (R, key("r", 2), key("never offered")):
                for index in (0, 1, 1000):
                    giver.links.send_blocks(taker.address, [(which, index, index % 2)])
            await until(lambda: taker.late == 9)
            assert bytes(taker.pool.host_block(0)) + bytes(taker.pool.host_block(1)) == before
            assert taker.verified_bytes == {channel: 2 * SMALL}

    run(story())


def test_a_header_that_names_too_much_brings_nothing(channel: str) -> None:
    """Beyond the pool, or longer than a block: refused before a byte is read."""

    async def story() -> None:
        async with two_ends(channel, 4) as (giver, taker):
            giver.give(R, [0], taker.address)
            await until(lambda: giver.sent)
            (end,) = taker.links._receiving.values()
            heard: list[int] = []
            sending = giver.links._ways[taker.address.worker]._end
            assert sending is not None
            ((good, frame),) = sending.pack(taker.address, [(R, 0, 3)])
            for header in (
                good,
                replace(good, offset=4 * SMALL),
                replace(good, offset=1 << 60),
                replace(good, size=1 << 40),
            ):
                came = [(header, memoryview(bytes(frame)))]
                end.take(giver.me, came, lambda _, taken: heard.extend(len(source) for _, source in taken))
            del frame
            await until(lambda: len(heard) == 4)
            assert sorted(heard) == ([SMALL] * 4 if channel == "tcp" else [0, 0, 0, SMALL])

    run(story())


def test_a_block_that_came_twice_in_one_message_is_filled_once(channel: str) -> None:
    """The second must not write over what the first has brought, or pass for good without a look."""

    async def story() -> None:
        async with two_ends(channel, 4) as (giver, taker):
            now = time.monotonic()
            giver.carry(giver.sender.open(offer_of(R, 2), taker.address, [0, 1], now))
            await until(lambda: R in taker.receiving.receiver)
            giver.links.send_blocks(taker.address, [(R, 0, 0), (R, 0, 3), (R, 1, 1), (R, 1, 1)])
            await until(lambda: taker.late == 2)
            giver.carry(giver.sender.prompt_computed(handover_of(R, 2), now))
            await until(lambda: taker.has(R))
            assert taker.content(R) == wanted([0, 1]) and taker.refused == 0

    run(story())


# ---------------------------------------------------------------- flow


def test_a_thousand_blocks_under_credits(channel: str) -> None:
    async def story() -> None:
        window = 16 * SMALL
        async with two_ends(channel, 1000, window_bytes=window) as (giver, taker):
            keys = [key(f"r{number}") for number in range(20)]
            for number, which in enumerate(keys):
                giver.give(which, list(range(50 * number, 50 * number + 50)), taker.address)
            await until(lambda: len(giver.events) == 20, 30.0)
            assert sorted(giver.sent) == sorted(keys) and giver.most_in_flight == window
            for number, which in enumerate(keys):
                assert taker.content(which) == wanted(list(range(50 * number, 50 * number + 50)))
            assert taker.verified_bytes == {channel: 1000 * SMALL}
            assert giver.sender.settled and giver.sender.bytes_in_flight == 0

    run(story())


# ---------------------------------------------------------------- other processes


class Other:
    """One end in a process of its own; every line it says is an object."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "tests.transfer.channel_ends", *argv]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hear(self) -> dict[str, Any]:
        """The next line; the test's own limit ends a wait for one that never comes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        said: dict[str, Any] = json.loads(line)
        return said

    async def say(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.hear)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def another(*argv: object) -> Iterator[Other]:
    other = Other(*map(str, argv))
    try:
        yield other
    finally:
        other.close()


def digest_of(blocks: list[int], block_bytes: int) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(wanted(blocks, block_bytes)))


def open_things() -> tuple[int, int, list[str]]:
    """Descriptors, mapped pools, and what of ours lies in /dev/shm."""
    maps = Path("/proc/self/maps").read_text().count("kvferry-pool")
    return (
        len(os.listdir("/proc/self/fd")),
        maps,
        [name for name in os.listdir("/dev/shm") if "kvferry" in name],
    )


def anonymous_bytes() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    ]
    return int(line.split()[1]) * 1024


def test_a_receiver_that_dies_takes_nothing_along_and_its_next_life_gets_everything(channel: str) -> None:
    async def story() -> None:
        pool = new_pool(32, SMALL)
        pool.fill()
        giver = Giver(pool, channel, window_bytes=4 * SMALL, timeout_s=0.5, retry_s=0.2)
        giver.start()
        try:
            with another("take", "decode-0", 1, channel, 32, SMALL) as other:
                target = address_of((await other.say())["address"])
                giver.give(key("first"), list(range(32)), target)
                assert (await other.say())["digest"] == digest_of(list(range(32)), SMALL)
                await until(lambda: giver.sent)
                before = open_things()
                other.signal(signal.SIGSTOP)
                giver.give(R, list(range(32)), target)
                await asyncio.sleep(0.1)
                other.signal(signal.SIGKILL)
            await until(lambda: giver.failed)
            await until(lambda: giver.sender.settled)
            assert open_things()[0] <= before[0] and open_things()[1:] == before[1:]
            with another("take", "decode-0", 2, channel, 32, SMALL) as other:
                target = address_of((await other.say())["address"])
                giver.give(key("r", 2), list(range(32)), target)
                said = await other.say()
                assert said["digest"] == digest_of(list(range(32)), SMALL)
                assert said["channels"] == {channel: 32 * SMALL}
            assert giver.links._ways["decode-0"].address == target  # type: ignore[index]
            await until(lambda: open_things()[0] <= before[0])
        finally:
            await giver.close()

    run(story())


def test_a_sender_that_dies_leaves_no_mapping_and_its_next_life_is_heard(channel: str) -> None:
    async def story() -> None:
        taker = Taker(new_pool(4096, SMALL), channel, timeout_s=0.5)
        taker.start()
        target = json.dumps({**vars_of(taker.address)})
        try:
            before = open_things()
            for life in (1, 2):
                with another("give", life, channel, 64, SMALL, target) as other:
                    for _ in range(3):
                        assert (await other.say())["failed"] == []
                    assert open_things()[1] - before[1] == (channel in IN_VIEW), "one mapping at most"
                    other.signal(signal.SIGKILL)
                await until(lambda: not taker.receiving.held, 5.0)
                await until(lambda: open_things() == before, 2.0)
            done = [which for which in taker.receiving.done if which[0].startswith("2-")]
            assert len(done) >= 3 and all(taker.content(d) == wanted(list(range(64))) for d in done)
        finally:
            await taker.close()

    run(story())


def vars_of(address: PeerAddress) -> dict[str, Any]:
    return {name: getattr(address, name) for name in address.__dataclass_fields__}


def test_a_stopped_receiver_delays_only_itself_and_costs_no_more_than_its_window(channel: str) -> None:
    async def story() -> None:
        size, window = 256 << 10, 2 << 20
        pool = new_pool(96, size)
        pool.fill()
        giver = Giver(pool, channel, window_bytes=window)
        giver.start()
        try:
            with (
                another("take", "decode-0", 1, channel, 97, size) as slow,
                another("take", "decode-1", 1, channel, 97, size) as fast,
            ):
                to_slow, to_fast = [address_of((await other.say())["address"]) for other in (slow, fast)]
                for number, target in enumerate((to_slow, to_fast)):
                    giver.give(key(f"warm {number}"), [0], target)
                await until(lambda: len(giver.sent) == 2)
                memory = anonymous_bytes()
                slow.signal(signal.SIGSTOP)
                giver.give(key("slow"), list(range(96)), to_slow)
                giver.give(key("fast"), list(range(96)), to_fast)
                await until(lambda: key("fast") in giver.sent)
                assert key("slow") not in giver.sent and giver.sender.bytes_in_flight <= window
                assert anonymous_bytes() - memory < 4 * window
                slow.signal(signal.SIGCONT)
                await until(lambda: key("slow") in giver.sent)
                await slow.say()  # of its first
                assert (await slow.say())["digest"] == digest_of(list(range(96)), size)
        finally:
            await giver.close()

    run(story())
