"""All sockets of one worker: to the coordinator, to the fronts, to and from other workers.

    control  DEALER ── connects ──▶ coordinator's ROUTER      commands in, answers and heartbeats out
    fronts   PUSH   ── connects ──▶ each front's PULL         token rows out
    peers    ROUTER ◀── binds       other workers' DEALERs    transfer control in, answers back the same way
    data     PULL   ◀── binds       other workers' PUSHes     block frames in
    out      DEALER + PUSH, one pair per decode worker that this one sends to

Identities carry the incarnation, so a restarted worker is a new peer and never a silent twin of its old pipe.
Sends never block: what a full socket does not take is dropped and counted, and the protocol says it again.
Every message is bounded in size by the socket and checked (`transfer/inbox.py`). A data message is two frames:
the block's bytes, then its header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import xxhash
import zmq
import zmq.asyncio

from common.counters import Counters
from common.errors import CannotBind, ProtocolViolation
from common.messages import MAX_MESSAGE_BYTES, Block, Message, PeerAddress, Sender
from common.request import Key, WorkerId
from transfer.inbox import LINGER_MS, Inbox, identity, make_socket, send

_HEADER_BYTES = 4096

MessageIn = Callable[[Message, Sender], None]
BlockIn = Callable[[Block, Sender, memoryview], None]


@dataclass(slots=True)
class _Out:
    """The way to one incarnation of one decode worker."""

    address: PeerAddress
    control: zmq.asyncio.Socket
    data: zmq.asyncio.Socket
    reader: asyncio.Task[None]


class Links:
    """Use inside a running event loop. Incoming messages go to the callbacks given to `start`."""

    def __init__(self, me: Sender, counters: Counters, *, block_bytes: int) -> None:
        self.me = me
        self._counters = counters
        self._block_bytes = block_bytes
        self._context = zmq.asyncio.Context()
        self._control: zmq.asyncio.Socket | None = None
        self._peers = self._socket(zmq.ROUTER, MAX_MESSAGE_BYTES)
        self._peers.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._data = self._socket(zmq.PULL, block_bytes + _HEADER_BYTES)
        self._fronts: dict[str, tuple[str, zmq.asyncio.Socket]] = {}
        self._out: dict[WorkerId, _Out] = {}
        self._senders: dict[WorkerId, bytes] = {}  # prefill worker → its newest identity at our ROUTER
        self._inbox = Inbox(counters)
        self._tasks: list[asyncio.Task[None]] = []
        self._on_peer: MessageIn | None = None

    # ------------------------------------------------------------ set-up

    def bind(self, host: str, port: int | None) -> PeerAddress:
        """Binds the peer and data sockets: on `port` and the next one, or on free ports. Raises CannotBind."""
        try:
            if port is None:
                control_port = self._peers.bind_to_random_port(f"tcp://{host}")
                data_port = self._data.bind_to_random_port(f"tcp://{host}")
            else:
                control_port, data_port = port, port + 1
                self._peers.bind(f"tcp://{host}:{control_port}")
                self._data.bind(f"tcp://{host}:{data_port}")
        except zmq.ZMQError as error:
            raise CannotBind(f"{host}, port {port or 'any'}: {error}; give another --advertise") from error
        where = f"tcp://{host}"
        return PeerAddress(
            WorkerId(self.me.name), self.me.incarnation, f"{where}:{control_port}", f"{where}:{data_port}"
        )

    def start(self, coordinator: str, on_control: MessageIn, on_peer: MessageIn, on_block: BlockIn) -> None:
        self._on_peer = on_peer
        self._control = self._socket(zmq.DEALER, MAX_MESSAGE_BYTES)
        self._control.setsockopt(zmq.IDENTITY, identity(self.me))
        self._control.connect(coordinator)
        self._spawn(self._read_messages(self._control, on_control))
        self._spawn(self._read_peers(on_peer))
        self._spawn(self._read_blocks(on_block))

    def connect_fronts(self, fronts: dict[str, str]) -> None:
        """Follows what the coordinator says of the fronts: new ones, moved ones, gone ones."""
        for name, (endpoint, socket) in list(self._fronts.items()):
            if fronts.get(name) != endpoint:
                socket.close(linger=0)
                del self._fronts[name]
        for name, endpoint in fronts.items():
            if name not in self._fronts:
                socket = self._socket(zmq.PUSH, MAX_MESSAGE_BYTES)
                socket.connect(endpoint)
                self._fronts[name] = (endpoint, socket)

    async def close(self) -> None:
        """Everything unsent gets LINGER_MS."""
        for task in (*self._tasks, *(out.reader for out in self._out.values())):
            task.cancel()
        await asyncio.sleep(0)
        self._context.destroy(linger=LINGER_MS)

    # ------------------------------------------------------------ sending

    def to_coordinator(self, message: Message) -> None:
        assert self._control is not None
        self._send(self._control, message)

    def to_front(self, front: str, message: Message) -> None:
        link = self._fronts.get(front)
        if link is None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)
            return
        self._send(link[1], message)

    def to_receiver(self, target: PeerAddress, message: Message) -> None:
        self._send(self._way_to(target).control, message)

    def to_sender(self, worker: WorkerId, message: Message) -> None:
        route = self._senders.get(worker)
        if route is None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)
            return
        self._send(self._peers, message, route)

    def send_block(self, target: PeerAddress, key: Key, index: int, content: memoryview) -> None:
        """Copies the block (its memory may be another request's a moment later) and ships it."""
        frame = bytes(content)
        header = Block(*key, index=index, part=0, checksum=xxhash.xxh3_64_intdigest(frame), size=len(frame))
        self._send(self._way_to(target).data, header, frame)

    def _send(self, socket: zmq.asyncio.Socket, message: Message, *before: bytes) -> None:
        send(socket, before, message, self.me, self._counters)

    def _way_to(self, target: PeerAddress) -> _Out:
        out = self._out.get(target.worker)
        if out is not None and out.address == target:
            return out
        if out is not None:
            self._drop_out(out)
        control = self._socket(zmq.DEALER, MAX_MESSAGE_BYTES)
        control.setsockopt(zmq.IDENTITY, identity(self.me))
        control.connect(target.control)
        data = self._socket(zmq.PUSH, _HEADER_BYTES)
        data.connect(target.data)
        assert self._on_peer is not None
        reader = asyncio.create_task(self._read_messages(control, self._on_peer))
        self._out[target.worker] = out = _Out(target, control, data, reader)
        return out

    def forget_peer(self, worker: WorkerId) -> None:
        """The coordinator no longer knows this decode worker."""
        out = self._out.pop(worker, None)
        if out is not None:
            self._drop_out(out)

    def _drop_out(self, out: _Out) -> None:
        out.reader.cancel()
        out.control.close(linger=0)
        out.data.close(linger=0)

    # ------------------------------------------------------------ receiving

    async def _read_messages(self, socket: zmq.asyncio.Socket, deliver: MessageIn) -> None:
        while True:
            frames = await socket.recv_multipart()
            read = self._inbox.read(frames[-1])
            if read is not None:
                deliver(read[1], read[0])

    async def _read_peers(self, deliver: MessageIn) -> None:
        while True:
            route, *frames = await self._peers.recv_multipart()
            read = self._inbox.read(frames[-1] if frames else b"", route)
            if read is not None:
                sender, message = read
                self._senders[WorkerId(sender.name)] = route
                deliver(message, sender)

    async def _read_blocks(self, deliver: BlockIn) -> None:
        while True:
            frames = await self._data.recv_multipart(copy=False)
            if len(frames) != 2:
                self._inbox.violated(
                    ProtocolViolation(f"{len(frames)} frames where a block and its header belong")
                )
                continue
            read = self._inbox.read(frames[1].buffer)
            if read is None:
                continue
            sender, header = read
            if isinstance(header, Block):
                deliver(header, sender, memoryview(frames[0].buffer))
            else:
                self._inbox.violated(ProtocolViolation(f"a {type(header).__name__} on the data socket"))

    # ------------------------------------------------------------ inside

    def _socket(self, kind: int, max_bytes: int) -> zmq.asyncio.Socket:
        return make_socket(self._context, kind, max_bytes)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))
