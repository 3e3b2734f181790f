"""Both ends of KV transfers over real sockets and channels: real protocol objects, bare pools, no model.

Run as a process of its own (`python -m tests.transfer.channel_ends take|give …`) it can be stopped and killed; it
leaves when its input ends, so it does not outlive who started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
import xxhash

from common.counters import Counters
from common.effects import Effect, SendBlocks, ToReceiver, ToSender, gathered
from common.endpoints import Endpoint
from common.messages import AboutRequest, Block, Message, PeerAddress, Sender
from common.request import Incarnation, Key, RequestId, WorkerId
from tests.transfer.bare_pool import BarePool, new_pool
from tests.transfer.pair import P, Receiving, handover_of, key, offer_of
from transfer.channel import Arrived, SendingEnd, store_wanted
from transfer.cluster_key import ClusterKey, key_of
from transfer.links import Links, peer_of
from transfer.receiver import TransferReceiver
from transfer.sender import SenderEvent, SendFailed, Sent, TransferSender
from transfer.sockets import keep_freed_memory

TURN_S = 0.02
NOBODY = "tcp://127.0.0.1:1"  # where a coordinator would be
Wrap = Callable[[SendingEnd], SendingEnd]


KEY_FILE = "KVFERRY_TEST_KEY_FILE"
HOST = "KVFERRY_TEST_HOST"


def here() -> Endpoint:
    return Endpoint(os.environ.get(HOST, "127.0.0.1"), None)


def cluster_key() -> ClusterKey | None:
    """Of the file that the environment names, here and in the processes that are started; none without one."""
    return key_of(Path(os.environ[KEY_FILE])) if KEY_FILE in os.environ else None


class _End:
    """Links, and a turn every TURN_S beside those that messages bring."""

    def __init__(self, name: str, incarnation: int, pool: BarePool) -> None:
        self.me = Sender(name, Incarnation(incarnation))
        self.pool = pool
        self.counters = Counters()
        self._turning: asyncio.Task[None] | None = None

    links: Links

    def start(self) -> None:
        self.links.start(NOBODY, lambda message, sender: None, self.hear, self.blocks)
        self._turning = asyncio.create_task(self._turn_again())

    async def _turn_again(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(TURN_S)

    async def close(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
        await self.links.close()
        self.pool.close()

    def hear(self, message: Message, sender: Sender) -> None:
        raise NotImplementedError

    def blocks(self, sender: Sender, came: Sequence[Arrived]) -> None:
        raise AssertionError("nobody sends blocks here")

    def turn(self) -> None:
        raise NotImplementedError


class Giver(_End):
    """A prefill worker as far as transfers go: whatever it offers is computed already."""

    def __init__(
        self,
        pool: BarePool,
        transfer: str,
        *,
        incarnation: int = 1,
        window_bytes: int = 8 << 20,
        wrap: Wrap = lambda end: end,
        **limits: float,
    ) -> None:
        super().__init__(P, incarnation, pool)
        ends = [wrap(end) for end in pool.sending(transfer, self.me)]
        self.links = Links(
            self.me, self.counters, block_bytes=pool.block_bytes, sending=ends, key=cluster_key()
        )
        self.links.bind(here())
        self.sender = TransferSender(block_bytes=pool.block_bytes, window_bytes=window_bytes, **limits)
        self.events: list[SenderEvent] = []
        self.most_in_flight = 0

    def give(self, which: Key, blocks: list[int], target: PeerAddress) -> None:
        now = time.monotonic()
        self.carry(self.sender.open(offer_of(which, len(blocks)), target, blocks, now))
        self.carry(self.sender.prompt_computed(handover_of(which, len(blocks)), now))

    def cancel(self, which: Key) -> None:
        self.carry(self.sender.cancel(which, "client left", time.monotonic()))

    def hear(self, message: Message, sender: Sender) -> None:
        assert isinstance(message, AboutRequest)
        effects, events = self.sender.receive(message, WorkerId(sender.name), time.monotonic())
        self.events += events
        self.carry(effects)
        self.turn()

    def turn(self) -> None:
        now = time.monotonic()
        effects, events = self.sender.expire(now)
        self.events += events
        self.carry(effects + self.sender.pump(now))
        self.most_in_flight = max(self.most_in_flight, self.sender.bytes_in_flight)

    def carry(self, effects: list[Effect]) -> None:
        for effect in gathered(effects):
            match effect:
                case ToReceiver(target, message):
                    self.links.to_receiver(target, message)
                case SendBlocks(target, blocks):
                    self.links.send_blocks(target, blocks)

    @property
    def sent(self) -> list[Key]:
        return [event.key for event in self.events if isinstance(event, Sent)]

    @property
    def failed(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, SendFailed)]


class Taker(_End):
    """A decode worker as far as transfers go. Blocks are placed one transfer after the other, and never twice."""

    def __init__(
        self,
        pool: BarePool,
        transfer: str,
        *,
        name: str = "decode-0",
        incarnation: int = 1,
        timeout_s: float = 45.0,
    ) -> None:
        super().__init__(name, incarnation, pool)
        ends = pool.receiving(transfer, self.me, self.counters, here().host)
        self.links = Links(
            self.me, self.counters, block_bytes=pool.block_bytes, receiving=ends, key=cluster_key()
        )
        self.address = self.links.bind(here())
        receiver = TransferReceiver(block_bytes=pool.block_bytes, timeout_s=timeout_s)
        self.receiving = Receiving(receiver, WorkerId(name), room=pool.num_blocks)
        self._giver = P  # as links know it: whoever spoke last
        self.refused = 0
        self.late = 0
        self.on_filled: Callable[[int], None] = lambda block: None
        self.verified_bytes: dict[str, int] = {}

    def hear(self, message: Message, sender: Sender) -> None:
        assert isinstance(message, AboutRequest)
        self._giver = peer_of(sender)
        self.carry(self.receiving.hear(message, time.monotonic()))
        self.turn()

    def blocks(self, sender: Sender, came: Sequence[Arrived]) -> None:
        """As `WorkerLoop` and `DecodeWorker` do it."""
        receiver, worker = self.receiving.receiver, WorkerId(sender.name)
        good = store_wanted(self.pool, came, lambda header: receiver.place(header, worker))
        for (header, _), right in zip(came, good, strict=True):
            self._block(header, worker, right)
        self.turn()

    def _block(self, header: Block, worker: WorkerId, good: bool) -> None:
        receiver, now = self.receiving.receiver, time.monotonic()
        if not good:
            self.refused += 1
            self.carry(receiver.nack(header, worker, "checksum or size is wrong"))
        filled = receiver.block(header, worker, good, now)
        if filled is not None:
            self.receiving.content[filled] = filled
            self.on_filled(filled)
            known = self.verified_bytes.get(header.channel, 0)
            self.verified_bytes[header.channel] = known + header.size
        elif good:
            self.late += 1

    def turn(self) -> None:
        self.carry(self.receiving.turn(time.monotonic()))

    def carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, ToSender)
            self.links.to_sender(self._giver, effect.message)

    def content(self, which: Key) -> list[bytes]:
        """What it has of a delivered transfer, block by block."""
        placed = self.receiving.done[which]
        return [bytes(self.pool.host_block(block)) for block in placed if isinstance(block, int)]

    def digest(self, which: Key) -> str:
        """Of all its blocks, one after the other."""
        digest = xxhash.xxh3_64()
        for block in self.receiving.done[which]:
            assert isinstance(block, int)
            digest.update(self.pool.host_block(block))
        return digest.hexdigest()

    def has(self, which: Key) -> bool:
        return which in self.receiving.done


async def until(true: Callable[[], Any], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- as a process


async def _take(name: str, incarnation: int, transfer: str, num_blocks: int, block_bytes: int) -> None:
    """Says its address, then of every transfer a digest of what it got."""
    _leave_with_input()
    taker = Taker(new_pool(num_blocks, block_bytes), transfer, name=name, incarnation=incarnation)
    taker.start()
    _say({"address": asdict(taker.address)})
    said: set[Key] = set()
    while True:
        for which in [which for which in taker.receiving.done if which not in said]:
            said.add(which)
            _say({"done": which[0], "digest": taker.digest(which), "channels": taker.verified_bytes})
        await asyncio.sleep(TURN_S)


async def _give(
    incarnation: int, transfer: str, num_blocks: int, block_bytes: int, target: PeerAddress
) -> None:
    """Gives its whole pool again and again; a word after each."""
    _leave_with_input()
    pool = new_pool(num_blocks, block_bytes)
    pool.fill()
    giver = Giver(pool, transfer, incarnation=incarnation)
    giver.start()
    for number in range(1_000_000):
        which = (RequestId(f"{incarnation}-{number}"), key()[1])
        giver.give(which, list(range(num_blocks)), target)
        await until(lambda w=which: w in giver.sent or giver.failed, 60.0)  # type: ignore[misc]
        _say({"sent": number, "failed": giver.failed})


def _leave_with_input() -> None:
    asyncio.get_running_loop().add_reader(sys.stdin, os._exit, 0)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def address_of(said: dict[str, Any]) -> PeerAddress:
    return PeerAddress(**said)


def main() -> None:
    keep_freed_memory()
    kind, *rest = sys.argv[1:]
    if kind == "take":
        name, incarnation, transfer, num_blocks, block_bytes = rest
        uvloop.run(_take(name, int(incarnation), transfer, int(num_blocks), int(block_bytes)))
    else:
        incarnation, transfer, num_blocks, block_bytes, target = rest
        address = address_of(json.loads(target))
        uvloop.run(_give(int(incarnation), transfer, int(num_blocks), int(block_bytes), address))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
