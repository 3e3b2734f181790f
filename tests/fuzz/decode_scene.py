"""A decode worker under attack: its peers, its data, its shm and ipc, and its coordinator gone mad."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from common.endpoints import Endpoint
from common.messages import (
    Abort,
    Block,
    Blocks,
    Decode,
    DevicePool as DevicePoolMessage,
    Drain,
    HeartbeatAck,
    Mapped,
    Message,
    NotMapped,
    Offer,
    PeerAddress,
    Prefill,
    Registered,
    RegistrationRefused,
    Segment,
    Sender,
    SetRole,
    Stop,
)
from common.request import Incarnation
from decode_node.worker import DecodeWorker
from tests.fuzz.counting import CountingInbox
from tests.fuzz.scenes import (
    BLOCK,
    BLOCKS,
    COORDINATOR,
    FRONT,
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
from tests.kernels.gpu.host_driver import build
from tests.transfer.bare_pool import BarePool
from tests.transfer.channel_ends import Giver
from tests.transfer.device_pool import DevicePool
from tests.transfer.pair import BLOCK_SIZE, handover_of, offer_of
from transfer.links import FROM_COORDINATOR, FROM_SENDERS, Links
from transfer.receiver import TransferReceiver

ANSWER_TOKENS = 60
CARRIED_BLOCKS = 3
HAND_OVER_AT = 3  # ticks: until then the transfer is half-way
PROMPT = list(range(100, 117))
HONEST = ("live", "carried")


class Work:
    """A request that the worker computes alone and one that is carried to it, again and again, as the next attempt."""

    def __init__(
        self, coordinator: HonestCoordinator, me: Sender, target: PeerAddress, giver: Giver, scene: Scene
    ) -> None:
        self._coordinator = coordinator
        self._me = me
        self._target = target
        self._giver = giver
        self._scene = scene
        self._attempt = self._ticks = 0
        self.over = True

    def tick(self) -> None:
        if self.over:
            self._begin()
        self._go_on()

    def _begin(self) -> None:
        self._attempt += 1
        self._ticks = 0
        self.over = False
        live, carried = key_of("live", self._attempt), key_of("carried", self._attempt)
        self._coordinator.wanted = {live, carried}
        self._coordinator.say(self._me, Decode(*live, request(live, PROMPT, ANSWER_TOKENS), b""))
        offer = offer_of(carried, CARRIED_BLOCKS)
        offer = replace(offer, request=replace(offer.request, front=FRONT))
        blocks = list(range(CARRIED_BLOCKS))
        self._giver.carry(self._giver.sender.open(offer, self._target, blocks, time.monotonic()))
        self._giver.sender.blocks_computed(carried, 1, time.monotonic())
        self._scene.attempts[:] = [max(1, self._attempt - 1), self._attempt, self._attempt, 1 << 61]

    def _go_on(self) -> None:
        live, carried = key_of("live", self._attempt), key_of("carried", self._attempt)
        coordinator, giver = self._coordinator, self._giver
        self._ticks += 1
        if self._ticks == HAND_OVER_AT:
            handover = handover_of(carried, CARRIED_BLOCKS)
            giver.carry(giver.sender.prompt_computed(handover, time.monotonic()))
        if {live, carried} <= coordinator.ended and not self.over:
            assert coordinator.tokens.pop(live) == answer(PROMPT, ANSWER_TOKENS)
            prompt = list(range(CARRIED_BLOCKS * BLOCK_SIZE))
            assert coordinator.tokens.pop(carried) == [5, *answer([*prompt, 5], 8)]
            assert carried in giver.sent and not giver.failed
            coordinator.ended.clear()
            giver.events.clear()
            self.over = True
            self._scene.done += 2

    def rest(self) -> bool:
        """Nothing new is begun; whether what was begun is over."""
        if not self.over:
            self._go_on()
        return self.over


def takes_over(message: Message) -> bool:
    """Who begins an honest request as its newest attempt says where it goes on, whoever that is."""
    return isinstance(message, (Offer, Decode, Prefill)) and message.id in HONEST


def commands(message: Message) -> bool:
    """What a coordinator may do to honest work, or to the worker."""
    if isinstance(message, (Drain, RegistrationRefused, SetRole, Registered)):
        return True
    if isinstance(message, HeartbeatAck):
        return bool(message.abort)
    return takes_over(message) or (isinstance(message, (Stop, Abort)) and message.id in HONEST)


@asynccontextmanager
async def decode_scene() -> AsyncIterator[Scene]:
    coordinator, attackers = HonestCoordinator(), Attackers()
    me = Sender("decode-0", Incarnation(1))
    pool, giving = BarePool(BLOCKS, BLOCK), BarePool(CARRIED_BLOCKS, BLOCK)
    giving.fill()
    receiver = TransferReceiver(block_bytes=BLOCK)
    node = DecodeWorker(batching(), receiver, fingerprint="fp", block_bytes=BLOCK)
    with TemporaryDirectory() as folder:
        device = DevicePool(BLOCKS, BLOCK, library=str(build(Path(folder))))
    ends = pool.receiving("auto", me, node.records.counters)
    ends += device.receiving("ipc", me, node.records.counters)
    links = Links(me, node.records.counters, block_bytes=BLOCK, receiving=ends)
    inbox = CountingInbox.all[-1]
    address = links.bind(Endpoint("127.0.0.1", None))
    giver = Giver(giving, "auto")
    async with worker_running(coordinator, node, links, pool, me) as loop:
        giver.start()
        scene = Scene(loop, inbox, [*HONEST, "x", "y"], [1])
        work = Work(coordinator, me, address, giver, scene)
        data = attackers.socket(zmq.PUSH, address.data)
        scene.doors = [
            Door("decode: peers", FROM_SENDERS, attackers.speaker(address.control), LIARS, takes_over),
            Door(
                "decode: data", (Block, Blocks), lambda n, frames: say(data, [bytes(BLOCK), *frames]), LIARS
            ),
            Door(
                "decode: control",
                FROM_COORDINATOR,
                lambda n, frames: coordinator.send(me, frames),
                (COORDINATOR,),
                commands,
            ),
            Door(
                "decode: shm",
                (Segment, Mapped, NotMapped),
                knocker(address.channels["shm"]),
                LIARS,
                counted=False,
            ),
            Door(
                "decode: ipc",
                (DevicePoolMessage, Mapped, NotMapped),
                knocker(address.channels["ipc"]),
                LIARS,
                counted=False,
            ),
        ]
        scene.work = work.tick
        scene.rest = lambda: work.rest() and node.idle and receiver.settled
        yield scene
        await giver.close()
    coordinator.close()
    attackers.close()
    pool.close()
    device.close()


def knocker(where: str) -> Callable[[int, list[bytes]], None]:
    """Connects to the unix socket, says it, now and then with descriptors beside it, and leaves."""

    def knock(n: int, frames: list[bytes]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made, suppress(OSError):
            made.setblocking(False)
            made.connect("\0" + where)
            socket.send_fds(made, [frames[0][:4096]], [made.fileno()] * (len(frames[0]) % 4))

    return knock
