"""The coordinator under attack: by strangers, and by one who is registered, beside an honest worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import zmq
import zmq.asyncio

from common.endpoints import Endpoint
from common.messages import (
    Accepted,
    Decode,
    Heartbeat,
    Message,
    Register,
    Registered,
    Sender,
    TokenRow,
    Tokens,
)
from common.request import Incarnation, Key, Request, RequestId, first_attempt_of_epoch
from common.wire import decode, encode
from coordinator.cluster import Cluster
from coordinator.control_plane import FROM_WORKERS, FRONT, ControlPlane
from coordinator.metrics import Metrics
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.streams import MailboxStream
from tests.coordinator.cluster_bench import heartbeat
from tests.fuzz.counting import CountingInbox
from tests.fuzz.scenes import EVIL, LIARS, Attackers, Door, Scene, answer, card_of, request, say
from tests.transfer.channel_ends import until
from transfer.inbox import identity

ANSWER_TOKENS = 12
PROMPT = list(range(100, 117))


class HonestWorker:
    """Says one token at each `tick` of what it was given."""

    def __init__(self, control: str, tokens: str, name: str = "decode-0") -> None:
        self.me = Sender(name, Incarnation(1))
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.DEALER)
        self._control.setsockopt(zmq.IDENTITY, identity(self.me))
        self._control.connect(control)
        self._tokens = self._context.socket(zmq.PUSH)
        self._tokens.connect(tokens)
        self._given: dict[Key, Request] = {}
        self._said: dict[Key, list[int]] = {}
        self._seq = 0
        self.registered = False
        self.keys: list[Key] = []
        self._say(card_of(self.me))
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            _, message = decode((await self._control.recv_multipart())[0])
            if isinstance(message, Registered):
                self.registered = True
            elif isinstance(message, Decode) and message.key not in self._given:
                self._given[message.key] = message.request
                self.keys.append(message.key)
                self._say(Accepted(*message.key))

    def tick(self) -> None:
        rows = []
        for key, given in list(self._given.items()):
            said = self._said.setdefault(key, [])
            whole = answer(PROMPT, given.sampling.max_tokens)
            finish = "length" if len(said) + 1 == len(whole) else None
            rows.append(TokenRow(*key, len(said), (whole[len(said)],), None, finish))  # type: ignore[arg-type]
            said.append(whole[len(said)])
            if finish:
                del self._given[key], self._said[key]
        if rows:
            self._seq += 1
            self._tokens.send(encode(Tokens(self._seq, tuple(rows)), self.me), flags=zmq.NOBLOCK)
        self._say(heartbeat(*[(key, "decoding") for key in self._given]))

    def _say(self, message: Message) -> None:
        self._control.send(encode(message, self.me), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._reader.cancel()
        self._context.destroy(linger=0)


class Work:
    """Requests whose answers come from the honest worker, a few at a time."""

    def __init__(self, plane: ControlPlane, worker: HonestWorker, scene: Scene) -> None:
        self._plane = plane
        self._worker = worker
        self._scene = scene
        self._count = 0
        self._open: set[asyncio.Task[None]] = set()

    def tick(self) -> None:
        while len(self._open) < 4:
            self._count += 1
            task = asyncio.create_task(self._ask(f"live-{self._count}"))
            self._open.add(task)
        self.go_on()

    def go_on(self) -> None:
        self._worker.tick()
        for task in [task for task in self._open if task.done()]:
            self._open.discard(task)
            task.result()
            self._scene.done += 1
        recent = self._worker.keys[-4:]
        self._scene.ids[:] = ["x", *(key[0] for key in recent)]
        self._scene.attempts[:] = [1, *(key[1] for key in recent), 1 << 61]

    async def _ask(self, name: str) -> None:
        key = (RequestId(name), first_attempt_of_epoch(0))
        asked = replace(request(key, PROMPT, ANSWER_TOKENS), front=FRONT)
        stream: MailboxStream = await self._plane.submit([asked])
        ids: list[int] = []
        finish = None
        while finish is None:
            delta = await stream.next()
            ids += delta.ids
            finish = delta.finish
        assert (ids, finish) == (answer(PROMPT, ANSWER_TOKENS), "length")

    def rest(self) -> bool:
        self.go_on()
        return not self._open


def _makes_itself_useful(message: Message) -> bool:
    """A registered worker that does not say it leaves is given work, as it asks for."""
    return isinstance(message, Register) or (isinstance(message, Heartbeat) and not message.draining)


@asynccontextmanager
async def coordinator_scene() -> AsyncIterator[Scene]:
    registry = Registry(tokenizer_hash="t", fronts={})
    queue = WaitingQueue(max_requests=64, max_tokens=100_000)
    cluster = Cluster(registry, queue, first_attempt=first_attempt_of_epoch(int(time.time())))
    plane = ControlPlane(cluster, Metrics(("default",)), collocated=True, request_timeout_s=60)
    inbox = CountingInbox.all[-1]
    tokens = plane.bind_tokens(Endpoint("127.0.0.1", None))
    registry.set_front(FRONT, tokens)
    attackers = Attackers()
    plane.start(Endpoint("127.0.0.1", None))
    control = plane._control.getsockopt_string(zmq.LAST_ENDPOINT)
    honest = HonestWorker(control, tokens)
    speak = attackers.speaker(control)
    pushed = attackers.socket(zmq.PUSH, tokens)
    speak(0, [encode(card_of(EVIL), EVIL)])
    speak(0, [encode(heartbeat(draining=True), EVIL)])
    await until(lambda: honest.registered and any(w.id == EVIL.name and w.draining for w in registry.all()))
    scene = Scene(plane, inbox, ["x"], [1])
    work = Work(plane, honest, scene)
    scene.doors = [
        Door("coordinator: control", FROM_WORKERS, _with_signs_of_life(speak), LIARS, _makes_itself_useful),
        Door("coordinator: tokens", (Tokens,), lambda n, frames: say(pushed, frames), LIARS),
    ]
    scene.work = work.tick
    scene.rest = lambda: work.rest() and cluster.settled
    yield scene
    with suppress(asyncio.CancelledError):
        await plane.close()
    honest.close()
    attackers.close()


def _with_signs_of_life(
    speak: Callable[[int, list[bytes]], None],
) -> Callable[[int, list[bytes]], None]:
    """The registered attacker stays registered: now and then it says a valid heartbeat between its garbage."""
    count = 0

    def speak_on(n: int, frames: list[bytes]) -> None:
        nonlocal count
        count += 1
        if count % 50 == 0:
            speak(0, [encode(heartbeat(draining=True), EVIL)])
        speak(n, frames)

    return speak_on
