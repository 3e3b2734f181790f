"""Stands between all processes of a service without their knowing, and does to links and messages what a test asks.

    worker ─ control, tokens ─▶ │ proxy │ ─▶ coordinator         prefill ─ control, blocks ─▶ │ proxy │ ─▶ decode

It relays TCP connections one to one, so a process that dies, connects again or is cut off looks to the other end as
it would without a proxy; and it reads the ZMTP inside, so single messages can be named. Workers are started with
`--coordinator` pointing here. Other addresses are only told by the coordinator, so they are rewritten where they
pass: the fronts in `Registered`, the decode worker in `Prefill` and `Rebind`. Each pair of processes gets ports of
its own, which is how a link between two of them can be cut while others stand.

A link that is `cut` is closed and cannot be opened; one that is `stalled` stands and carries nothing, what was said
meanwhile comes late; one that is `slow` carries so many bytes a second in each connection and direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from common.errors import ProtocolViolation
from common.messages import (
    Block,
    Blocks,
    Decode,
    Message,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Registered,
    Sender,
)
from common.wire import decode, encode
from tests.chaos import zmtp
from tests.chaos.rules import Passing, Rule, phases_of

COORDINATOR = "coordinator"
LIMIT_S = 10.0
T = TypeVar("T")
_PIECE_BYTES = 1 << 14


@dataclass(slots=True)
class Link:
    """What two processes say to each other, over however many connections."""

    state: Literal["open", "cut", "stalled"] = "open"
    bytes_per_s: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    connections: list[_Connection] = field(default_factory=list)

    async def until_it_carries(self) -> None:
        while self.state == "stalled":
            await self.changed.wait()


@dataclass(slots=True)
class _End:
    """One way of a connection, to `writer`; `source` and `target` are processes' names."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    source: str
    target: str


@dataclass(slots=True)
class _Connection:
    up: _End
    down: _End
    link: Link | None = None

    def close(self) -> None:
        for end in (self.up, self.down):
            end.writer.transport.abort()


class Proxy:
    """Use as a context. Runs in a thread of its own; every method may be called from any other."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._links: dict[frozenset[str], Link] = {}
        self._servers: list[asyncio.Server] = []
        self._relays: dict[tuple[str, str], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rules: tuple[Rule, ...] = ()
        self._salts: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self.faults: list[str] = []
        self.control = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.control = self._call(self._relay("", COORDINATOR, self._coordinator))
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    # ------------------------------------------------------------ what a test asks

    def add(self, rule: Rule) -> Rule:
        self._rules = (*self._rules, rule)
        return rule

    def let_go(self, rule: Rule) -> None:
        self._do(rule.let_go)

    def place(self, salt: str) -> tuple[str, str]:
        """Prefill worker ("" where there is none) and decode worker of the newest dispatch of a request."""
        return self._places[salt]

    def id_of(self, salt: str) -> str:
        """Of a request that was dispatched, else ""."""
        return self._ids.get(salt, "")

    def cut(self, a: str, b: str) -> None:
        self._do(lambda: self._set(a, b, state="cut"))

    def stall(self, a: str, b: str) -> None:
        self._do(lambda: self._set(a, b, state="stalled"))

    def slow(self, a: str, b: str, bytes_per_s: float) -> None:
        self._do(lambda: self._set(a, b, bytes_per_s=bytes_per_s))

    def restore(self) -> None:
        """Every link is as it should be, no rule holds any more, and what was held goes on."""
        rules, self._rules = self._rules, ()

        def restored() -> None:
            for pair in self._links:
                self._set(*pair)
            for rule in rules:
                rule.let_go()

        self._do(restored)

    def _do(self, change: Callable[[], None]) -> None:
        async def done() -> None:
            change()

        self._call(done())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    # ------------------------------------------------------------ links and relays

    def _link(self, a: str, b: str) -> Link:
        return self._links.setdefault(frozenset((a, b)), Link())

    def _set(
        self,
        a: str,
        b: str,
        *,
        state: Literal["open", "cut", "stalled"] = "open",
        bytes_per_s: float | None = None,
    ) -> None:
        link = self._link(a, b)
        link.state, link.bytes_per_s = state, bytes_per_s
        link.changed.set()
        link.changed = asyncio.Event()
        if state == "cut":
            for connection in link.connections:
                connection.close()

    async def _relay(self, client: str, server: str, endpoint: str) -> str:
        """Where `client` finds `server`; a client without a name is named by the identity of its socket."""
        there = urlsplit(endpoint)
        known = self._relays.get((client, endpoint))
        if known is not None:
            return known

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connect(reader, writer, client, server, there.port or 0))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        listening = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._servers.append(listening)
        here = f"tcp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._relays[client, endpoint] = here
        return here

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: str,
        server: str,
        port: int,
    ) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        up = _End(reader, server_writer, client, server)
        down = _End(server_reader, writer, server, client)
        connection = _Connection(up, down)
        try:
            if client and not self._joins(connection):
                return
            both = [asyncio.ensure_future(self._carry(connection, end)) for end in (up, down)]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for one in both:
                one.cancel()
            for outcome in await asyncio.gather(*both, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, (EOFError, OSError)):
                    self.faults.append(f"{client or up.source} ↔ {server}: {outcome!r}")
        finally:
            connection.close()
            if connection.link is not None:
                connection.link.connections.remove(connection)

    def _joins(self, connection: _Connection) -> bool:
        """Both ends are known now; False where their link is cut."""
        link = self._link(connection.up.source, connection.up.target)
        if link.state == "cut":
            return False
        link.connections.append(connection)
        connection.link = link
        return True

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ one way of one connection

    async def _carry(self, connection: _Connection, end: _End) -> None:
        left = zmtp.GREETING_BYTES
        while left:  # piece by piece: each side waits for the other's before it goes on
            piece = await end.reader.read(left)
            if not piece:
                return
            end.writer.write(piece)
            left -= len(piece)
        bodies: list[bytes] = []
        while True:
            frame = await zmtp.read_frame(end.reader)
            if frame.is_command:
                if connection.link is None and end is connection.up and frame.body[1:6] == b"READY":
                    name = zmtp.identity(frame.body).rpartition("/")[0]
                    connection.up.source = connection.down.target = name
                    if not self._joins(connection):
                        return
                if connection.link is not None:
                    await connection.link.until_it_carries()
                end.writer.write(frame.raw)
                continue
            bodies.append(frame.body)
            if not frame.more:
                for one in _one_by_one(bodies):
                    await self._pass(connection, end, one)
                bodies = []

    async def _pass(self, connection: _Connection, end: _End, bodies: list[bytes]) -> None:
        link = connection.link
        assert link is not None, "a message before READY"
        await link.until_it_carries()
        try:
            sender, message = decode(bodies[-1])
        except ProtocolViolation:
            await self._write(link, end, zmtp.pack(bodies))
            return
        self._learn(end.target, message)
        message = await self._rewritten(end.target, message, bodies, sender)
        phases = {self._salts.get(id, ""): phase for id, phase in phases_of(message).items()}
        passing = Passing(end.source, end.target, message, phases)
        for rule in self._rules:
            if rule.takes(passing):
                await self._act(rule, link, end, bodies, message, sender)
                return
        await self._write(link, end, zmtp.pack(bodies))

    async def _act(
        self, rule: Rule, link: Link, end: _End, bodies: list[bytes], message: Message, sender: Sender
    ) -> None:
        match rule.action:
            case "see":
                await self._write(link, end, zmtp.pack(bodies))
            case "double":
                await self._write(link, end, zmtp.pack(bodies) * 2)
            case "delay":
                self._loop.call_later(rule.delay_s, _write_late, end, zmtp.pack(bodies))
            case "hold":
                raw = zmtp.pack(bodies)
                rule.keep(lambda: _write_late(end, raw))
            case "corrupt":
                await self._write(link, end, zmtp.pack(_damaged(bodies, message, sender)))
            case "drop":
                pass

    async def _write(self, link: Link, end: _End, raw: bytes) -> None:
        if link.bytes_per_s is None:
            end.writer.write(raw)
            await end.writer.drain()
            return
        for at in range(0, len(raw), _PIECE_BYTES):
            piece = raw[at : at + _PIECE_BYTES]
            end.writer.write(piece)
            await end.writer.drain()
            if link.bytes_per_s is not None:
                await asyncio.sleep(len(piece) / link.bytes_per_s)

    # ------------------------------------------------------------ what passes

    def _learn(self, worker: str, message: Message) -> None:
        if isinstance(message, (Prefill, Decode, Offer)):
            self._salts[message.id] = message.request.cache_salt
            self._ids[message.request.cache_salt] = message.id
        salt = self._salts.get(message.id, "") if isinstance(message, (Prefill, Decode, Rebind)) else ""
        if not salt:
            return
        if isinstance(message, Decode):
            self._places[salt] = ("", worker)
        elif isinstance(message, (Prefill, Rebind)) and message.target is not None:
            self._places[salt] = (worker, message.target.worker)

    async def _rewritten(self, worker: str, message: Message, bodies: list[bytes], sender: Sender) -> Message:
        """The message as the worker is to read it, also in `bodies`."""
        rewritten = message
        if isinstance(message, Registered):
            fronts = {
                name: await self._relay(worker, COORDINATOR, there) for name, there in message.fronts.items()
            }
            rewritten = replace(message, fronts=fronts)
        elif isinstance(message, (Prefill, Rebind)) and message.target is not None:
            rewritten = replace(message, target=await self._by_us(worker, message.target))
        if rewritten is not message:
            bodies[-1] = encode(rewritten, sender)
        return rewritten

    async def _by_us(self, worker: str, target: PeerAddress) -> PeerAddress:
        control = await self._relay(worker, target.worker, target.control)
        data = await self._relay(worker, target.worker, target.data)
        return replace(target, control=control, data=data)


def _one_by_one(bodies: list[bytes]) -> list[list[bytes]]:
    """Several blocks go on one by one, each with its own header, as workers before 2.3 send them."""
    try:
        sender, message = decode(bodies[-1])
    except ProtocolViolation:
        return [bodies]
    if not isinstance(message, Blocks):
        return [bodies[first : first + 2] for first in range(0, len(bodies), 2)]
    frames = bodies[:-1] or [b""] * len(message.rows)
    return [
        [frame, encode(Block(*row[:6], message.channel, row[6]), sender)]
        for frame, row in zip(frames, message.rows, strict=True)
    ]


def _write_late(end: _End, raw: bytes) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        if not end.writer.transport.is_closing():
            end.writer.write(raw)


def _damaged(bodies: list[bytes], message: Message, sender: Sender) -> list[bytes]:
    """A bit of the block is wrong; where its bytes go another way, its checksum is."""
    if bodies[0] and len(bodies) > 1:
        body = bytearray(bodies[0])
        body[len(body) // 2] ^= 1
        return [bytes(body), *bodies[1:]]
    assert isinstance(message, Block)
    return [*bodies[:-1], encode(replace(message, checksum=message.checksum ^ 1), sender)]
