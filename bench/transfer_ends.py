"""Both ends of a stream of KV blocks, each a process: `python -m bench.transfer_ends give|take WAY …`.

    tcp, shm, gloo   production: sender, receiver, links, channel, checksums; no model and no worker around them
    zeromq           a PUSH and a PULL that send the same frames and do nothing else: what tcp is measured against

The receiving end says where it is, the sending end is told. After that a line on the sending end's input is one round,
in which every block goes over once; it answers with the round's seconds. Either answers "cpu" with the processor
seconds that it has used so far. Both end with their input, so neither outlives who started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from common.counters import Counters
from common.effects import Effect, SendBlocks, ToReceiver, ToSender, gathered
from common.endpoints import Endpoint
from common.messages import (
    AboutRequest,
    Cancel,
    Cancelled,
    Delivered,
    Handover,
    Message,
    Offer,
    PeerAddress,
    Sender,
)
from common.request import (
    Attempt,
    FrontId,
    Incarnation,
    Key,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    pack_ids,
)
from kernels.block_bytes import copy_blocks
from transfer.channel import Arrived, Pool as ChannelPool, store_wanted
from transfer.cluster_key import ClusterKey, key_of
from transfer.in_flight import WINDOW_BYTES
from transfer.links import Links, peer_of
from transfer.own_channels import OnDevice, receiving_ends, sending_ends
from transfer.receiver import TransferReceiver
from transfer.segment import PoolSegment
from transfer.sender import SendFailed, Sent, TransferSender
from transfer.sockets import keep_freed_memory

AT_ONCE = 64  # blocks of one transfer: a prompt of about a thousand tokens
BLOCK_TOKENS = 16
LOOK_S = 0.05  # between looks at deadlines
ROUND_LIMIT_S = 60.0
NOBODY = "tcp://127.0.0.1:1"  # where a coordinator would be
HERE = Endpoint("127.0.0.1", None)
P, D = Sender("prefill-0", Incarnation(1)), Sender("decode-0", Incarnation(1))
GIVER = peer_of(P)


class Pool:
    """The bytes of blocks, every page touched: in huge pages, or in a segment that others may map."""

    def __init__(self, num_blocks: int, block_bytes: int, *, shown: bool) -> None:
        self.block_bytes = block_bytes
        self.segment = PoolSegment()
        size = num_blocks * block_bytes
        memory = self.segment.allocate(size) if shown else None
        if memory is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(memory)
        for block in range(num_blocks):
            self.host_block(block)[:] = (os.urandom(256) * -(-block_bytes // 256))[:block_bytes]

    def host_block(self, block: int) -> memoryview:
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self.host_block(block) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        return copy_blocks(self.read_blocks(blocks), sources)


# ---------------------------------------------------------------- production


class Giver:
    """A prefill worker as far as transfers go: whatever it offers is computed already."""

    def __init__(
        self,
        channel: str,
        pool: ChannelPool,
        segment: PoolSegment,
        num_blocks: int,
        block_bytes: int,
        key: ClusterKey | None,
        on_device: OnDevice | None = None,
    ) -> None:
        """`segment`: what the pool was made in, if it was; `on_device` of one that is on a GPU. Raises BadConfiguration
        where there is no such channel."""
        self._num_blocks = num_blocks
        ends = sending_ends(channel, P, pool, segment, on_device)
        self._links = Links(P, Counters(), block_bytes=block_bytes, sending=ends, key=key)
        self._links.bind(HERE)
        self._sender = TransferSender(block_bytes=block_bytes, window_bytes=WINDOW_BYTES)
        self._left = 0
        self._all_sent = asyncio.Event()

    async def run(self, target: PeerAddress, rounds: AsyncIterable[int]) -> None:
        self._links.start(NOBODY, lambda message, sender: None, self._hear, _no_blocks)
        looking = asyncio.create_task(_again_and_again(self._turn))
        async for number in rounds:
            self._all_sent.clear()
            for first in range(0, self._num_blocks, AT_ONCE):
                blocks = list(range(first, min(first + AT_ONCE, self._num_blocks)))
                self._give((RequestId(f"{number}-{first}"), Attempt(1)), blocks, target)
            await asyncio.wait_for(self._all_sent.wait(), ROUND_LIMIT_S)
        looking.cancel()
        await self._links.close()

    def _give(self, key: Key, blocks: list[int], target: PeerAddress) -> None:
        now, tokens = time.monotonic(), len(blocks) * BLOCK_TOKENS
        request = Request(key[0], pack_ids(range(tokens)), SamplingParams(max_tokens=2), FrontId("f"))
        self._left += 1
        self._carry(self._sender.open(Offer(*key, request, b"", tokens, b"", "fp"), target, blocks, now))
        self._carry(self._sender.prompt_computed(Handover(*key, pack_ids([5]), None, len(blocks), 0), now))

    def _hear(self, message: Message, sender: Sender) -> None:
        assert isinstance(message, AboutRequest)
        effects, events = self._sender.receive(message, WorkerId(sender.name), time.monotonic())
        self._note(events)
        self._carry(effects)
        self._turn()

    def _turn(self) -> None:
        now = time.monotonic()
        effects, events = self._sender.expire(now)
        self._note(events)
        self._carry([*effects, *self._sender.pump(now)])

    def _note(self, events: Iterable[Sent | SendFailed]) -> None:
        for event in events:
            if isinstance(event, SendFailed):
                raise RuntimeError(event.reason)
            self._left -= 1
        if self._left == 0:
            self._all_sent.set()

    def _carry(self, effects: Iterable[Effect]) -> None:
        for effect in gathered(effects):
            match effect:
                case ToReceiver(target, message):
                    self._links.to_receiver(target, message)
                case SendBlocks(target, blocks):
                    self._links.send_blocks(target, blocks)


class Taker:
    """A decode worker as far as transfers go. A transfer's place is in its id, so that a round fills the pool once."""

    def __init__(
        self,
        channel: str,
        pool: ChannelPool,
        block_bytes: int,
        key: ClusterKey | None,
        on_device: OnDevice | None = None,
    ) -> None:
        """Raises BadConfiguration where there is no such channel."""
        counters = Counters()
        self._pool = pool
        ends = receiving_ends(channel, D, counters, block_bytes, on_device)
        self._links = Links(D, counters, block_bytes=block_bytes, receiving=ends, key=key)
        self._receiver = TransferReceiver(block_bytes=block_bytes, window_bytes=WINDOW_BYTES)

    async def run(self, rounds: Rounds) -> None:
        async with self.taking() as address:
            _say({"address": asdict(address)})
            async for _ in rounds:
                raise RuntimeError("only the sending end has rounds")

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[PeerAddress]:
        """Blocks are taken at this address meanwhile."""
        address = self._links.bind(HERE)
        self._links.start(NOBODY, lambda message, sender: None, self._hear, self._blocks)
        looking = asyncio.create_task(_again_and_again(self._turn))
        try:
            yield address
        finally:
            looking.cancel()
            await self._links.close()

    def _hear(self, message: Message, sender: Sender) -> None:
        now, peer = time.monotonic(), peer_of(sender)
        match message:
            case Offer() if message.key not in self._receiver:
                first, count = int(message.id.partition("-")[2]), message.num_tokens // BLOCK_TOKENS
                blocks = list(range(first, first + count))
                self._carry(self._receiver.accept(message.key, peer, blocks, 0, count, now))
            case Handover() if message.key in self._receiver:
                self._carry(self._receiver.handed_over(message, now))
            case Cancel():
                self._receiver.drop(message.key)
                self._carry([ToSender(peer, Cancelled(*message.key))])
        self._turn()

    def _blocks(self, sender: Sender, came: Sequence[Arrived]) -> None:
        """As `WorkerLoop` does it."""
        worker, now = peer_of(sender), time.monotonic()
        good = store_wanted(self._pool, came, lambda header: self._receiver.place(header, worker))
        for (header, _), right in zip(came, good, strict=True):
            if not right:
                self._carry(self._receiver.nack(header, worker, "checksum or size is wrong"))
            self._receiver.block(header, worker, right, now)
        self._turn()

    def _turn(self) -> None:
        delivered = [ToSender(GIVER, Delivered(*ready.key)) for ready in self._receiver.ready()]
        said, _ = self._receiver.expire(time.monotonic())
        self._carry([*delivered, *said, *self._receiver.flush()])

    def _carry(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, ToSender)
            self._links.to_sender(effect.worker, effect.message)


def _no_blocks(sender: Sender, came: Sequence[Arrived]) -> None:
    raise AssertionError("nobody sends blocks here")


async def _again_and_again(turn: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        turn()


# ---------------------------------------------------------------- ZeroMQ alone


async def give_bare(
    num_blocks: int, block_bytes: int, key: ClusterKey | None, where: dict[str, str], rounds: Rounds
) -> None:
    """As much in flight as the window of production; a word comes back when all of a round is there."""
    context = zmq.asyncio.Context()
    pool = Pool(num_blocks, block_bytes, shown=False)
    data: zmq.asyncio.Socket = context.socket(zmq.PUSH)
    data.setsockopt(zmq.SNDHWM, WINDOW_BYTES // block_bytes)
    done: zmq.asyncio.Socket = context.socket(zmq.PULL)
    for socket, name in ((data, "data"), (done, "done")):
        if key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        socket.connect(where[name])
    async for _ in rounds:
        for block in range(num_blocks):
            await data.send(pool.host_block(block), copy=True)
        await done.recv()
    context.destroy(linger=0)


async def take_bare(num_blocks: int, block_bytes: int, key: ClusterKey | None, rounds: Rounds) -> None:
    context = zmq.asyncio.Context()
    data: zmq.asyncio.Socket = context.socket(zmq.PULL)
    data.setsockopt(zmq.RCVHWM, WINDOW_BYTES // block_bytes)
    done: zmq.asyncio.Socket = context.socket(zmq.PUSH)
    where = {}
    for socket, name in ((data, "data"), (done, "done")):
        if key is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        where[name] = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    _say({"address": where})

    async def take() -> None:
        while True:
            for _ in range(num_blocks):
                frame = await data.recv(copy=False)
                assert len(frame) == block_bytes
            await done.send(b"")

    taking = asyncio.create_task(take())
    async for _ in rounds:
        raise RuntimeError("only the sending end has rounds")
    taking.cancel()
    context.destroy(linger=0)


# ---------------------------------------------------------------- as a process


class Rounds:
    """This process's input: numbers of rounds, each answered with its seconds when the next is asked for."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._started: float | None = None
        asyncio.get_running_loop().add_reader(sys.stdin, self._read)

    def _read(self) -> None:
        line = sys.stdin.readline()
        if line.strip() == "cpu":
            _say({"cpu_s": time.process_time()})
        else:
            self._lines.put_nowait(line.strip())

    def __aiter__(self) -> Rounds:
        return self

    async def __anext__(self) -> int:
        if self._started is not None:
            _say({"seconds": time.perf_counter() - self._started})
        line = await self._lines.get()
        if not line:
            raise StopAsyncIteration
        self._started = time.perf_counter()
        return int(line)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def _run(asked: argparse.Namespace) -> None:
    rounds, key = Rounds(), key_of(asked.key)
    sizes = (asked.blocks, asked.block_bytes, key)
    match asked.end, asked.way:
        case "take", "zeromq":
            await take_bare(*sizes, rounds)
        case "give", "zeromq":
            await give_bare(*sizes, json.loads(asked.target), rounds)
        case "take", channel:
            pool = Pool(asked.blocks, asked.block_bytes, shown=False)
            await Taker(channel, pool, asked.block_bytes, key).run(rounds)
        case _, channel:
            pool = Pool(asked.blocks, asked.block_bytes, shown=channel == "shm")
            giver = Giver(channel, pool, pool.segment, *sizes)
            await giver.run(PeerAddress(**json.loads(asked.target)), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer_ends")
    parser.add_argument("end", choices=["give", "take"])
    parser.add_argument("way", choices=["tcp", "shm", "gloo", "zeromq"])
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--key", type=Path)
    parser.add_argument(
        "--keep-memory", action="store_true", help="as workers do; zeromq is measured with it and without"
    )
    parser.add_argument("--target", default="")
    asked = parser.parse_args()
    if asked.keep_memory:
        keep_freed_memory()
    uvloop.run(_run(asked))


if __name__ == "__main__":
    main()
