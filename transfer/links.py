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
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import xxhash
import zmq
import zmq.asyncio

from common.counters import Counters
from common.errors import CannotBind, ProtocolViolation
from common.messages import Block, Message, PeerAddress, Sender
from common.request import Key, WorkerId
from common.wire import MAX_MESSAGE_BYTES
from transfer.inbox import LINGER_MS, Inbox, identity, make_socket, send

_HEADER_BYTES = 4096
UNANSWERED_S = 3.0

MessageIn = Callable[[Message, Sender], None]
BlockIn = Callable[[Block, Sender, memoryview], None]


@dataclass(slots=True)
class _Out:
    """The way to one incarnation of one decode worker. `unanswered_since`: the oldest message without any answer
    after it."""

    address: PeerAddress
    control: zmq.asyncio.Socket
    data: zmq.asyncio.Socket
    reader: asyncio.Task[None]
    unanswered_since: float | None = None


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
        self._on_control: MessageIn | None = None
        self._coordinator = ""
        self._control_reader: asyncio.Task[None] | None = None

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
        self._coordinator = coordinator
        self._on_control = on_control
        self._connect_control()
        self._spawn(self._read_peers(on_peer))
        self._spawn(self._read_blocks(on_block))

    def _connect_control(self) -> None:
        assert self._on_control is not None
        self._control = self._dealer(self._coordinator)
        self._control_reader = asyncio.create_task(self._read_messages(self._control, self._on_control))

    def reconnect_control(self) -> None:
        """A new connection to the coordinator. The old one may look whole and lead nowhere: a ROUTER lets whoever
        comes last with a name take it over, and does not tell the one before."""
        assert self._control is not None and self._control_reader is not None
        self._control_reader.cancel()
        self._control.close(linger=0)
        self._connect_control()

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
        readers = [out.reader for out in self._out.values()]
        if self._control_reader is not None:
            readers.append(self._control_reader)
        for task in (*self._tasks, *readers):
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
        out = self._way_to(target)
        out.unanswered_since = out.unanswered_since or time.monotonic()
        self._send(out.control, message)

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
        """The connection to `target`; a new one when it is another life of that worker, or when it has answered
        nothing for UNANSWERED_S (everything said to it has an answer, so then it leads nowhere)."""
        out = self._out.get(target.worker)
        if out is not None:
            since = out.unanswered_since
            if out.address == target and (since is None or time.monotonic() - since < UNANSWERED_S):
                return out
            self._drop_out(out)
        control = self._dealer(target.control)
        data = self._socket(zmq.PUSH, _HEADER_BYTES)
        data.connect(target.data)
        reader = asyncio.create_task(self._read_messages(control, self._answered(target.worker)))
        self._out[target.worker] = out = _Out(target, control, data, reader)
        return out

    def _answered(self, worker: WorkerId) -> MessageIn:
        def deliver(message: Message, sender: Sender) -> None:
            out = self._out.get(worker)
            if out is not None:
                out.unanswered_since = None
            assert self._on_peer is not None
            self._on_peer(message, sender)

        return deliver

    def _dealer(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._socket(zmq.DEALER, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, identity(self.me))
        socket.connect(endpoint)
        return socket

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
                self._inbox.guard(deliver, read[1], read[0])

    async def _read_peers(self, deliver: MessageIn) -> None:
        while True:
            route, *frames = await self._peers.recv_multipart()
            read = self._inbox.read(frames[-1] if frames else b"", route)
            if read is not None:
                sender, message = read
                self._senders[WorkerId(sender.name)] = route
                self._inbox.guard(deliver, message, sender)

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
                self._inbox.guard(deliver, header, sender, memoryview(frames[0].buffer))
            else:
                self._inbox.violated(ProtocolViolation(f"a {type(header).__name__} on the data socket"))

    # ------------------------------------------------------------ inside

    def _socket(self, kind: int, max_bytes: int) -> zmq.asyncio.Socket:
        return make_socket(self._context, kind, max_bytes)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))
