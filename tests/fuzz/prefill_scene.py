"""A prefill worker under attack: by whoever finds its peer socket, and by a decode worker gone mad."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import zmq

from common.endpoints import Endpoint
from common.messages import Abort, PeerAddress, Prefill, Sender
from common.request import Incarnation, WorkerId
from prefill_node.worker import PrefillWorker
from tests.fuzz.counting import CountingInbox
from tests.fuzz.scenes import (
    BLOCK,
    BLOCKS,
    EVIL,
    LIARS,
    Attackers,
    Door,
    HonestCoordinator,
    Scene,
    answer,
    batching,
    key_of,
    request,
    say,
    worker_running,
)
from tests.transfer.bare_pool import BarePool
from tests.transfer.channel_ends import Taker
from transfer.inbox import identity
from transfer.links import FROM_RECEIVERS, FROM_SENDERS, Links
from transfer.sender import TransferSender

PROMPT = list(range(100, 121))
BAIT_TICKS = 4


class Work:
    """A prompt that goes to an honest decode worker, again and again, beside one that goes to the mad one."""

    def __init__(
        self, coordinator: HonestCoordinator, me: Sender, taker: Taker, evil: PeerAddress, scene: Scene
    ) -> None:
        self._coordinator = coordinator
        self._me = me
        self._taker = taker
        self._evil = evil
        self._scene = scene
        self._attempt = self._bait = self._ticks = 0
        self.over = True

    def tick(self) -> None:
        if self.over:
            self._begin()
        if self._ticks % BAIT_TICKS == 0:
            self._give_bait()
        self._ticks += 1
        self._go_on()

    def _begin(self) -> None:
        self._attempt += 1
        self.over = False
        live = key_of("live", self._attempt)
        self._coordinator.wanted.add(live)
        self._coordinator.say(self._me, Prefill(*live, request(live, PROMPT, 9), b"", self._taker.address))
        self._taker.receiving.next_block = 0

    def _give_bait(self) -> None:
        self.withdraw_bait()
        self._bait += 1
        bait = key_of("bait", self._bait)
        self._coordinator.wanted.add(bait)
        self._coordinator.say(self._me, Prefill(*bait, request(bait, PROMPT, 9), b"", self._evil))
        self._scene.attempts[:] = [1, max(1, self._bait - 1), self._bait, self._bait, self._attempt, 1 << 61]

    def withdraw_bait(self) -> None:
        bait = key_of("bait", self._bait)
        if bait in self._coordinator.wanted:
            self._coordinator.wanted.discard(bait)
            self._coordinator.say(self._me, Abort(*bait, "another one"))

    def _go_on(self) -> None:
        live = key_of("live", self._attempt)
        if self.over or live not in self._taker.receiving.done or live not in self._coordinator.tokens:
            return
        assert self._coordinator.tokens.pop(live) == answer(PROMPT, 1)
        assert self._taker.receiving.times_done.pop(live) == 1
        del self._taker.receiving.done[live]
        self._coordinator.wanted.discard(live)
        self.over = True
        self._scene.done += 1

    def rest(self) -> bool:
        self.withdraw_bait()
        self._go_on()
        return self.over


@asynccontextmanager
async def prefill_scene() -> AsyncIterator[Scene]:
    coordinator, attackers = HonestCoordinator(), Attackers()
    me = Sender("prefill-0", Incarnation(1))
    pool = BarePool(BLOCKS, BLOCK)
    sender = TransferSender(block_bytes=BLOCK)
    node = PrefillWorker(batching(), sender, fingerprint="fp", block_bytes=BLOCK)
    links = Links(me, node.records.counters, block_bytes=BLOCK, sending=pool.sending("tcp", me))
    inbox = CountingInbox.all[-1]
    address = links.bind(Endpoint("127.0.0.1", None))
    taker = Taker(BarePool(64, BLOCK), "tcp")
    router, control = attackers.bound(zmq.ROUTER)
    sink, data = attackers.bound(zmq.PULL)
    evil = PeerAddress(WorkerId(EVIL.name), EVIL.incarnation, control, data)

    def answer_evilly(n: int, frames: list[bytes]) -> None:
        for heard in (router, sink):
            with suppress(zmq.Again):
                while True:
                    heard.recv_multipart(flags=zmq.NOBLOCK)
        say(router, [identity(me), *frames])

    async with worker_running(coordinator, node, links, pool, me) as loop:
        taker.start()
        scene = Scene(loop, inbox, ["live", "bait", "x"], [1])
        work = Work(coordinator, me, taker, evil, scene)
        honest = Sender(taker.me.name, taker.me.incarnation)
        scene.doors = [
            Door("prefill: ways", FROM_RECEIVERS, answer_evilly, (EVIL, EVIL, EVIL, *LIARS, honest)),
            Door(
                "prefill: peers", (*FROM_SENDERS, *FROM_RECEIVERS), attackers.speaker(address.control), LIARS
            ),
        ]
        scene.work = work.tick
        scene.rest = lambda: work.rest() and node.idle and sender.settled
        yield scene
        await taker.close()
    coordinator.close()
    attackers.close()
    pool.close()
