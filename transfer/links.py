"""All sockets of one worker: to the coordinator, to the fronts, to and from other workers.

    control  DEALER ── connects ──▶ coordinator's ROUTER      commands in, answers and heartbeats out
    fronts   PUSH   ── connects ──▶ each front's PULL         token rows out
    peers    ROUTER ◀── binds       other workers' DEALERs    transfer control in, answers back the same way
    data     PULL   ◀── binds       other workers' PUSHes     block frames in
    ways     DEALER + PUSH, one pair per decode worker that this one sends to, and its channel (`way.py`)

Identities carry the incarnation, so a restarted worker is a new peer and never a silent twin of its old pipe. Each
socket takes what is said on it and nothing else: a command comes from the coordinator's socket or from nobody, an
answer only from the life of the worker that its way leads to, and what a prefill worker began nobody else of its name,
or another life of it, can go on with or end (it is known by its identity: `peer_of`).
Sends never block: what a full socket does not take is dropped and counted, and the protocol says it again.
Every message is bounded in size by the socket (`sockets.py`) and checked (`inbox.py`). What a data message consists
of: `data_messages.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import zmq
import zmq.asyncio

from common.counters import Counters
from common.effects import BLOCKS_AT_ONCE
from common.endpoints import Endpoint, parse_endpoint
from common.errors import ProtocolViolation
from common.messages import (
    Abort,
    Accept,
    Block,
    Cancel,
    Cancelled,
    Credit,
    Decode,
    Delivered,
    Drain,
    Handover,
    HeartbeatAck,
    Later,
    Message,
    Nack,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Registered,
    RegistrationRefused,
    Revoke,
    Sender,
    SetRole,
    Stop,
)
from common.request import WorkerId
from common.wire import MAX_MESSAGE_BYTES
from transfer.addresses import bind
from transfer.channel import BlocksIn, Outbound, ReceivingEnd, SendingEnd
from transfer.cluster_key import ClusterKey
from transfer.data_messages import HEADER_BYTES, blocks_in
from transfer.fronts import Fronts
from transfer.inbox import Inbox, Turns, identity, only, send
from transfer.presence import Presence
from transfer.sockets import LINGER_MS, Sockets
from transfer.way import Way

log = logging.getLogger(__name__)

UNANSWERED_S = 3.0
MAX_WAYS = 256  # two sockets each; more are not kept, and made again when they are needed

FROM_COORDINATOR = (
    Registered, RegistrationRefused, HeartbeatAck, Prefill, Decode, Rebind, Stop, Abort, Drain, SetRole,
)  # fmt: skip
FROM_SENDERS = (Offer, Handover, Cancel, Cancelled)
FROM_RECEIVERS = (Accept, Later, Refused, Credit, Nack, Delivered, Revoke, Cancel, Cancelled)

MessageIn = Callable[[Message, Sender], None]


def peer_of(sender: Sender) -> WorkerId:
    """A prefill worker as who receives from it knows it: this life of it and no other."""
    return WorkerId(identity(sender).decode())


class Links:
    """Use inside a running event loop. Incoming messages go to the callbacks given to `start`.

    Blocks go out over the first of `sending` that a peer takes, and come in over any of `receiving`.
    """

    def __init__(
        self,
        me: Sender,
        counters: Counters,
        *,
        block_bytes: int,
        sending: Sequence[SendingEnd] = (),
        receiving: Sequence[ReceivingEnd] = (),
        key: ClusterKey | None = None,
    ) -> None:
        self.me = me
        self._counters = counters
        self._sending = sending
        self._receiving = {end.name: end for end in receiving}
        self._block_bytes = block_bytes
        self._sockets = Sockets(counters, key)
        self._control: zmq.asyncio.Socket | None = None
        self._peers = self._sockets.listening(zmq.ROUTER, MAX_MESSAGE_BYTES, "transfer control")
        self._peers.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._peers.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to who has left is counted as unsent
        self._data = self._sockets.listening(zmq.PULL, block_bytes + HEADER_BYTES, "KV blocks")
        self._fronts = Fronts(self._sockets)
        self._ways: dict[WorkerId, Way] = {}
        self._inbox = Inbox(counters)
        self.computing: Callable[[], bool] = lambda: False
        """Whether a step is out that reading blocks is to leave room for."""
        self._tasks: list[asyncio.Task[None]] = []
        self._on_peer: MessageIn | None = None
        self._on_control: MessageIn | None = None
        self._coordinator: Endpoint | None = None
        self._control_reader: asyncio.Task[None] | None = None
        self._coordinators: Presence | None = None
        self._on_gone: Callable[[WorkerId], None] = lambda _: None

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels that blocks go out or come in over, in order of preference."""
        return tuple(end.name for end in self._sending) or tuple(self._receiving)

    # ------------------------------------------------------------ set-up

    def bind(self, where: Endpoint, told: Endpoint | None = None) -> PeerAddress:
        """Binds the peer and data sockets: on the port and the next one, or on free ports. `told`: what others reach
        them at, where that is not where they listen. Raises CannotBind."""
        told = told or where
        control_port = bind(self._peers, where, "--bind or --advertise")
        data = replace(where, port=None if where.port is None else where.port + 1)
        data_port = bind(self._data, data, "--bind or --advertise")
        if told.port is not None:
            control_port, data_port = told.port, told.port + 1
        return PeerAddress(
            WorkerId(self.me.name),
            self.me.incarnation,
            str(replace(told, port=control_port)),
            str(replace(told, port=data_port)),
            {name: end.where for name, end in self._receiving.items()},
            BLOCKS_AT_ONCE,
            one_header=True,
        )

    def start(
        self,
        coordinator: str,
        on_control: MessageIn,
        on_peer: MessageIn,
        on_blocks: BlocksIn,
        on_gone: Callable[[WorkerId], None] = lambda _: None,
    ) -> None:
        """`on_gone` hears of peers that we sent to and that nobody answers for any more."""
        self._on_peer = on_peer
        self._on_gone = on_gone
        self._coordinator = parse_endpoint(coordinator)
        self._on_control = on_control
        self._connect_control()
        for end in self._receiving.values():
            end.start()
        self._spawn(self._read_peers(on_peer))
        self._spawn(self._read_blocks(on_blocks))

    def _connect_control(self) -> None:
        assert self._on_control is not None and self._coordinator is not None
        self._coordinators = Presence(lambda: None)
        self._control = self._dealer(f"the coordinator at {self._coordinator}", self._coordinators)
        self._control.connect(str(self._coordinator))
        reading = self._read_messages(self._control, FROM_COORDINATOR, self._on_control)
        self._control_reader = asyncio.create_task(reading)

    def reconnect_control(self) -> None:
        """A new connection to the coordinator. The old one may look whole and lead nowhere: a ROUTER lets whoever
        comes last with a name take it over, and does not tell the one before."""
        assert (
            self._control is not None and self._control_reader is not None and self._coordinators is not None
        )
        self._control_reader.cancel()
        self._coordinators.end()
        self._control.close(linger=0)
        self._connect_control()

    def connect_fronts(self, fronts: dict[str, str]) -> None:
        assert self._coordinator is not None
        self._fronts.follow(fronts, self._coordinator)

    async def close(self) -> None:
        """Everything unsent gets LINGER_MS, where anybody is there to take it. (The fronts are the coordinator's.)"""
        for way in self._ways.values():
            way.close(linger_ms=LINGER_MS)
        there = self._coordinators is not None and self._coordinators.there
        if self._coordinators is not None:
            self._coordinators.end()
        if self._control_reader is not None:
            self._control_reader.cancel()
        for task in self._tasks:
            task.cancel()
        for sending in self._sending:
            await sending.end()
        for receiving in self._receiving.values():
            await receiving.end()
        await asyncio.sleep(0)
        self._peers.close(linger=LINGER_MS)
        await self._sockets.end(LINGER_MS if there else 0)

    # ------------------------------------------------------------ sending

    def to_coordinator(self, message: Message) -> None:
        assert self._control is not None
        self._send(self._control, message)

    def to_front(self, front: str, message: Message) -> None:
        socket = self._fronts.get(front)
        if socket is None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)
            return
        self._send(socket, message)

    def to_receiver(self, target: PeerAddress, message: Message) -> None:
        try:
            way = self._way_to(target, again=isinstance(message, Offer))
        except zmq.ZMQError as error:
            self._unreachable(target, message, error)
            return
        way.unanswered_since = way.unanswered_since or time.monotonic()
        way.say(message)

    def _unreachable(self, target: PeerAddress, message: Message, error: zmq.ZMQError) -> None:
        """Its address is none, or we are out of sockets: the request is to go on elsewhere at once."""
        self._counters.add("unsent_messages_total", kind=type(message).__name__)
        log.warning("%s cannot be reached at %s: %s", target.worker, target.control, error)
        if isinstance(message, Offer):
            self._refuse(target)(message, f"it cannot be reached: {error}")

    def to_sender(self, peer: WorkerId, message: Message) -> None:
        """`peer`: as `peer_of` names it."""
        self._send(self._peers, message, peer.encode())

    def send_blocks(self, target: PeerAddress, blocks: Sequence[Outbound]) -> None:
        """Ships pool blocks, as their content is now; it may be another a moment later."""
        try:
            way = self._way_to(target)
        except zmq.ZMQError:  # we are out of sockets: it counts as lost, and will be asked for
            self._counters.add("unsent_messages_total", float(len(blocks)), kind=Block.__name__)
            return
        way.send_blocks(blocks)

    def _send(self, socket: zmq.asyncio.Socket, message: Message, *before: bytes) -> None:
        send(socket, before, message, self.me, self._counters)

    def _way_to(self, target: PeerAddress, *, again: bool = False) -> Way:
        """The connection to `target`; a new one when it is another life of that worker, or when it has answered
        nothing for UNANSWERED_S (everything said to it has an answer, so then it leads nowhere), or when no channel
        is open and one is to be sought `again`."""
        way = self._ways.get(target.worker)
        if way is not None:
            since = way.unanswered_since
            silent = since is not None and time.monotonic() - since >= UNANSWERED_S
            if way.address == target and not silent and not (way.shut and again):
                self._ways[target.worker] = self._ways.pop(target.worker)  # in order of use
                return way
            way.close(keep_channel=way.address == target)
            del self._ways[target.worker]
        if len(self._ways) >= MAX_WAYS:
            self._ways.pop(next(iter(self._ways))).close()
        way = self._ways[target.worker] = self._make_way(target)
        way.choose(self._sending)
        return way

    def _make_way(self, target: PeerAddress) -> Way:
        """Raises ZMQError, and leaves nothing behind, where the address is none or there are no sockets left."""
        presence = Presence(lambda: self._peer_gone(target))
        sockets: list[zmq.asyncio.Socket] = []
        try:
            where = f"{target.worker} at {target.data}"
            sockets.append(self._sockets.calling(zmq.PUSH, HEADER_BYTES, where, gave_up=presence.refused))
            sockets.append(self._dealer(f"{target.worker} at {target.control}", presence))
            data, control = sockets
            data.connect(target.data)
            control.connect(target.control)
        except zmq.ZMQError:
            presence.end()
            for socket in sockets:
                socket.close(linger=0)
            raise
        reader = asyncio.create_task(self._read_messages(control, FROM_RECEIVERS, self._answered(target)))
        return Way(self.me, self._counters, target, control, data, presence, reader, self._refuse(target))

    def _peer_gone(self, target: PeerAddress) -> None:
        """Its sockets, and by its channel what it had mapped, are released now and not when it is spoken to again."""
        self._ways.pop(target.worker).close()
        log.info("%s at %s is gone", target.worker, target.control)
        self._inbox.guard(self._on_gone, target.worker)

    def _refuse(self, target: PeerAddress) -> Callable[[Offer, str], None]:
        """Answers an offer in the name of a peer that no channel leads to; not from inside the call that made it."""

        def refuse(offer: Offer, why: str) -> None:
            assert self._on_peer is not None
            refused = Refused(*offer.key, f"no KV can go there: {why}")
            sender = Sender(target.worker, target.incarnation)
            asyncio.get_running_loop().call_soon(self._inbox.guard, self._on_peer, refused, sender)

        return refuse

    def _answered(self, target: PeerAddress) -> MessageIn:
        def deliver(message: Message, sender: Sender) -> None:
            if (sender.name, sender.incarnation) != (target.worker, target.incarnation):
                self._inbox.violated(ProtocolViolation(f"{target.worker} speaks as {sender.name}"))
                return
            way = self._ways.get(target.worker)
            if way is not None:
                way.unanswered_since = None
            assert self._on_peer is not None
            self._on_peer(message, sender)

        return deliver

    def _dealer(self, name: str, presence: Presence) -> zmq.asyncio.Socket:
        socket = self._sockets.calling(zmq.DEALER, MAX_MESSAGE_BYTES, name, presence=presence)
        socket.setsockopt(zmq.IDENTITY, identity(self.me))
        return socket

    # ------------------------------------------------------------ receiving

    async def _read_messages(
        self, socket: zmq.asyncio.Socket, kinds: tuple[type[Message], ...], deliver: MessageIn
    ) -> None:
        turns = Turns()
        while True:
            read = self._inbox.read(only(await turns.receive(socket.recv_multipart())), kinds=kinds)
            if read is not None:
                self._inbox.guard(deliver, read[1], read[0])
            await turns.after_message()

    async def _read_peers(self, deliver: MessageIn) -> None:
        """Those who send: where blocks do not come in, nobody has anything to say."""
        kinds = FROM_SENDERS if self._receiving else ()
        turns = Turns()
        while True:
            route, *frames = await turns.receive(self._peers.recv_multipart())
            read = self._inbox.read(only(frames), route, kinds)
            if read is not None:
                self._inbox.guard(deliver, read[1], read[0])
            await turns.after_message()

    async def _read_blocks(self, deliver: BlocksIn) -> None:
        turns = Turns(lambda: self.computing())
        while True:
            frames = await turns.receive(self._data.recv_multipart(copy=False))
            read = blocks_in(frames, self._inbox, self._receiving)
            if read is not None:
                sender, came = read
                end = self._receiving[came[0][0].channel]
                self._inbox.guard(end.take, sender, came, deliver)
            await turns.after_message()

    # ------------------------------------------------------------ inside

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))
