"""All sockets of one worker: to the coordinator, to the fronts, to and from other workers.

    control  DEALER ── connects ──▶ coordinator's ROUTER      commands in, answers and heartbeats out
    fronts   PUSH   ── connects ──▶ each front's PULL         token rows out
    peers    ROUTER ◀── binds       other workers' DEALERs    transfer control in, answers back the same way
    data     PULL   ◀── binds       other workers' PUSHes     block frames in
    out      DEALER + PUSH, one pair per decode worker that this one sends to

Identities carry the incarnation, so a restarted worker is a new peer and never a silent twin of its old pipe.
Sends never block: what a full socket does not take is dropped and counted, and the protocol says it again.
Every message is bounded in size by the socket and checked by `common.messages.decode`; a peer that sends
garbage is counted, and after MAX_VIOLATIONS of it no longer listened to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash
import zmq
import zmq.asyncio

from common.counters import Counters
from common.errors import CannotBind, ProtocolViolation
from common.messages import MAX_MESSAGE_BYTES, Block, Message, PeerAddress, Sender, decode, encode
from common.request import Key, WorkerId

log = logging.getLogger(__name__)

LINGER_MS = 1000
SEND_HWM = 100_000
MAX_VIOLATIONS = 100
_HEADER_BYTES = 4096

MessageIn = Callable[[Message, Sender], None]
BlockIn = Callable[[Block, Sender, memoryview], None]


def identity(sender: Sender) -> bytes:
    return f"{sender.name}/{sender.incarnation}".encode()


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
        self._violations: dict[bytes, int] = {}
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
        self._send(self._control, [encode(message, self.me)], message)

    def to_front(self, front: str, message: Message) -> None:
        link = self._fronts.get(front)
        if link is None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)
            return
        self._send(link[1], [encode(message, self.me)], message)

    def to_receiver(self, target: PeerAddress, message: Message) -> None:
        self._send(self._way_to(target).control, [encode(message, self.me)], message)

    def to_sender(self, worker: WorkerId, message: Message) -> None:
        route = self._senders.get(worker)
        if route is None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)
            return
        self._send(self._peers, [route, encode(message, self.me)], message)

    def send_block(self, target: PeerAddress, key: Key, index: int, content: memoryview) -> None:
        """Copies the block (its memory may be another request's a moment later) and ships it."""
        frame = bytes(content)
        header = Block(*key, index=index, part=0, checksum=xxhash.xxh3_64_intdigest(frame), size=len(frame))
        self._send(self._way_to(target).data, [encode(header, self.me), frame], header)

    def _send(self, socket: zmq.asyncio.Socket, frames: Sequence[bytes], message: Message) -> None:
        sent = socket.send_multipart(list(frames), flags=zmq.NOBLOCK, copy=True)
        if sent.done() and sent.exception() is not None:
            self._counters.add("unsent_messages_total", kind=type(message).__name__)

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
            self._take(b"", frames[-1], deliver)

    async def _read_peers(self, deliver: MessageIn) -> None:
        while True:
            route, *frames = await self._peers.recv_multipart()
            sender = self._take(route, frames[-1] if frames else b"", deliver)
            if sender is not None:
                self._senders[WorkerId(sender.name)] = route

    def _take(self, route: bytes, data: bytes, deliver: MessageIn) -> Sender | None:
        if self._violations.get(route, 0) >= MAX_VIOLATIONS:
            return None
        try:
            sender, message = decode(data)
            if route and route != identity(sender):
                raise ProtocolViolation(f"{sender.name} speaks from another's address")
        except ProtocolViolation as error:
            self._violated(route, error)
            return None
        if route:
            self._senders[WorkerId(sender.name)] = route
        deliver(message, sender)
        return sender

    async def _read_blocks(self, deliver: BlockIn) -> None:
        while True:
            frames = await self._data.recv_multipart(copy=False)
            try:
                if len(frames) != 2:
                    raise ProtocolViolation(f"{len(frames)} frames where a header and a block belong")
                sender, header = decode(frames[0].buffer)
                if not isinstance(header, Block):
                    raise ProtocolViolation(f"a {type(header).__name__} on the data socket")
            except ProtocolViolation as error:
                self._violated(b"data", error)
                continue
            deliver(header, sender, memoryview(frames[1].buffer))

    def _violated(self, route: bytes, error: ProtocolViolation) -> None:
        self._counters.add("protocol_violations_total")
        count = self._violations[route] = self._violations.get(route, 0) + 1
        if route in (b"", b"data"):
            self._violations.pop(route)  # the coordinator is trusted; data frames name no peer to shut out
        if len(self._violations) > 10_000:
            del self._violations[next(iter(self._violations))]
        if count == 1:
            log.warning("dropped a message: %s", error.message)

    # ------------------------------------------------------------ inside

    def _socket(self, kind: int, max_bytes: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.RCVHWM, SEND_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _spawn(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        self._tasks.append(asyncio.create_task(coroutine))
