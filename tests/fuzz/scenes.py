"""Real objects on real sockets, with honest work that goes on beside the attack: what the fuzz throws things at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import zmq
import zmq.asyncio

from common.batching import Batch, BatchingCore
from common.blocks import BlockPool
from common.messages import (
    Heartbeat,
    HeartbeatAck,
    Message,
    PeerAddress,
    Register,
    Registered,
    Sender,
    Tokens,
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
from common.wire import decode, encode
from tests.coordinator.cluster_bench import card
from tests.fuzz.counting import CountingInbox
from tests.transfer.channel_ends import until
from tests.transfer.pair import BLOCK_SIZE
from tests.transfer.test_worker_loop import NoGrammars
from transfer.inbox import identity
from transfer.links import Links
from transfer.pure_worker import Step
from transfer.worker_loop import WorkerLoop

BLOCK = 1024
BLOCKS = 128
COORDINATOR = Sender("coordinator", Incarnation(1))
FRONT = FrontId("front-0")
EVIL = Sender("evil", Incarnation(5))
LIARS = (EVIL, Sender("prefill-0", Incarnation(99)), Sender("decode-0", Incarnation(99)))
"""Who the attacker says it is: nobody known, and other lives of those who are."""


@dataclass(frozen=True, slots=True)
class Door:
    """One socket. `say` sends frames as `who[n]`. A message for which `legitimate` holds is, valid as it is, a command
    that its sender may give: it is not said."""

    name: str
    kinds: tuple[type[Message], ...]
    say: Callable[[int, list[bytes]], None]
    who: Sequence[Sender]
    legitimate: Callable[[Message], bool] = lambda message: False
    counted: bool = True  # what comes in at it is read by the inbox that the scene counts


@dataclass(slots=True)
class Scene:
    """`root` is what must neither grow nor raise. `work` does the next bit of honest work, raising when some was
    disturbed; `done` counts what came to its right end."""

    root: Any
    inbox: CountingInbox
    ids: list[str]
    attempts: list[int]
    doors: list[Door] = field(default_factory=list)
    work: Callable[[], None] = lambda: None
    rest: Callable[[], bool] = lambda: True
    done: int = 0


class Attackers:
    """Sockets of their own, which never wait."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def socket(self, kind: int, endpoint: str, name: bytes = b"") -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if name:
            made.setsockopt(zmq.IDENTITY, name)
        made.connect(endpoint)
        return made

    def bound(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return made, f"tcp://127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"

    def speaker(self, endpoint: str) -> Callable[[int, list[bytes]], None]:
        """One connection for each of LIARS."""
        sockets = [self.socket(zmq.DEALER, endpoint, identity(who)) for who in LIARS]
        return lambda n, frames: say(sockets[n], frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


def say(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    with suppress(zmq.Again):
        socket.send_multipart(frames, flags=zmq.NOBLOCK)


# ---------------------------------------------------------------- a model that shows a disturbed answer


def next_token(last: int, length: int) -> int:
    return (last * 31 + length * 7 + 1) % 1000


def answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class _Row:
    ids: tuple[int, ...]
    logprobs: None = None
    prompt_logprobs: tuple[()] = ()


def step(batch: Batch) -> Any:
    """A token is a function of the last one and its place."""
    time.sleep(0.0002)
    rows, at = [], 0
    for start, count, samples in zip(batch.starts, batch.counts, batch.samples, strict=True):
        last = batch.token_ids[at + count - 1]
        at += count
        rows.append(_Row((next_token(last, start + count),) if samples else ()))
    return rows, {}


def batching() -> BatchingCore:
    return BatchingCore(
        BlockPool(BLOCKS),
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefix_caching=True,
        fingerprint="fp",
    )


def request(key: Key, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(key[0], pack_ids(prompt), SamplingParams(max_tokens=max_tokens), FRONT)


# ---------------------------------------------------------------- who commands a worker


def card_of(me: Sender) -> Register:
    """A registration that may travel."""
    address = PeerAddress(WorkerId(me.name), me.incarnation, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    return replace(card(me.name, blocks=BLOCKS), address=address)


class HonestCoordinator:
    """Registers whoever comes, wants nothing but `wanted`, and keeps the tokens that its front gets."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._front = self._context.socket(zmq.PULL)
        self._fronts = {str(FRONT): f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"}
        self.wanted: set[Key] = set()
        self.wants_all = False
        self.tokens: dict[Key, list[int]] = {}
        self.ended: set[Key] = set()
        self.load: Heartbeat | None = None
        self.registered: list[Sender] = []
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_tokens())]

    def say(self, worker: Sender, message: Message) -> None:
        self.send(worker, [encode(message, COORDINATOR)])

    def send(self, worker: Sender, frames: list[bytes]) -> None:
        self._router.send_multipart([identity(worker), *frames], flags=zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            route, data = await self._router.recv_multipart()
            sender, message = decode(data)
            assert route == identity(sender)
            if isinstance(message, Register):
                self.registered.append(sender)
                self.say(sender, Registered(512, 0.1, self._fronts))
            elif isinstance(message, Heartbeat):
                self.load = message
                unwanted = tuple((i, a) for i, a, _ in message.live if (i, a) not in self.wanted)
                unwanted = () if self.wants_all else unwanted
                self.say(sender, HeartbeatAck(known=True, abort=unwanted))

    async def _read_tokens(self) -> None:
        while True:
            _, message = decode((await self._front.recv_multipart())[0])
            assert isinstance(message, Tokens)
            for row in message.rows:
                tokens = self.tokens.setdefault((row.id, row.attempt), [])
                if row.first <= len(tokens):
                    tokens += row.ids[len(tokens) - row.first :]
                if row.finish is not None:
                    self.ended.add((row.id, row.attempt))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)


@asynccontextmanager
async def worker_running(
    coordinator: HonestCoordinator, node: Any, links: Links, pool: Any, me: Sender, run: Step = step
) -> AsyncIterator[WorkerLoop]:
    """A worker's loop with real sockets, up to its stop."""
    loop = WorkerLoop(node, run, NoGrammars(), cast(Any, pool), links, card_of(me), shutdown_timeout_s=1.0)
    running = asyncio.create_task(loop.run(coordinator.endpoint))
    try:
        await until(lambda: coordinator.load is not None)
        yield loop
        assert not running.done(), "the worker has ended"
    finally:
        loop.stop()
        loop.stop()
        await asyncio.wait_for(running, 5)


def key_of(name: str, attempt: int) -> Key:
    return (RequestId(name), Attempt(attempt))
