"""The sending end of `gloo` and `nccl`: a process group with each receiver, and a thread that waits in it.

Blocks go into a group in the order in which they were packed. A header names its block's number in that order, and the
receiver, which knows how many it has received, lets those pass that no header came for.

gloo reads a block when the receiver is ready for it, out of the pool: it may have been written over by then, and the
checksum refuses it, as over shm (the argument: `shm.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from common.endpoints import parse_endpoint
from common.group_messages import Join
from common.messages import Block, ChannelName, PeerAddress, Sender
from common.request import WorkerId
from kernels.block_bytes import checksums
from transfer.channel import Frame, Outbound, Pool
from transfer.pair_thread import OPEN_S, PairThread, all_over, in_words
from transfer.process_group import SENDER, Group
from transfer.rendezvous import CannotJoin, Connection, PairStore, connect

MakeGroup = Callable[[PairStore, int, str, float], Group]
"""Store, rank, this machine's address that leads to the peer, and for how many seconds to try."""

BlockTensor = Callable[[int, memoryview], torch.Tensor]
"""A pool block, uint8 `[block_bytes]`, where the group takes it from; beside its number, its bytes on this host."""

_MAX_WAITING = 4096  # messages; the window of the protocol above is far below it
_FIRST_BITS = 48


def host_tensor(block: int, view: memoryview) -> torch.Tensor:
    """The pool's own memory."""
    return torch.frombuffer(view, dtype=torch.uint8)


def copied_tensor(block: int, view: memoryview) -> torch.Tensor:
    """For a pool on a device, whose next view overwrites this one."""
    return torch.frombuffer(bytearray(view), dtype=torch.uint8)


class GroupSending:
    def __init__(
        self,
        name: ChannelName,
        me: Sender,
        pool: Pool,
        make: MakeGroup,
        tensor: BlockTensor,
    ) -> None:
        self.name: ChannelName = name
        self._me = me
        self._pool = pool
        self._make = make
        self._tensor = tensor
        self._pairs: dict[WorkerId, _Pair] = {}
        self._threads: list[PairThread] = []

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        known = self._pairs.get(target.worker)
        if known is not None and known.target == target and known.is_open:
            known.opened, known.failed = opened, failed
            opened()
            return
        if known is not None:
            known.close()
        pair = self._pairs[target.worker] = _Pair(target, opened, failed)
        pair.thread = PairThread(
            f"{self.name} to {target.worker}", lambda: self._serve(pair), lambda why: self._lost(pair, why)
        )
        self._threads = [*(thread for thread in self._threads if not thread.is_over), pair.thread]
        pair.thread.start()

    def close(self, target: PeerAddress) -> None:
        pair = self._pairs.get(target.worker)
        if pair is not None and pair.target == target:
            del self._pairs[target.worker]
            pair.close()

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        pair = self._pairs[target.worker]
        views = self._pool.read_blocks([block for _, _, block in blocks])
        headers = [
            Block(*key, index, part=0, checksum=checksum, size=len(view), channel=self.name, offset=number)
            for number, ((key, index, _), view, checksum) in enumerate(
                zip(blocks, views, checksums(views), strict=True), pair.next
            )
        ]
        pair.next += len(blocks)
        pair.waiting.put(
            [self._tensor(block, view) for (_, _, block), view in zip(blocks, views, strict=True)]
        )
        if pair.waiting.qsize() > _MAX_WAITING:
            pair.thread.tell(self._lost, pair, "it takes nothing")
        return [(header, b"") for header in headers]

    async def end(self) -> None:
        for pair in list(self._pairs.values()):
            self.close(pair.target)
        await all_over(self._threads)

    def _opened(self, pair: _Pair, connection: Connection) -> None:
        if pair.thread.closed:
            return
        pair.thread.watch(connection.watched())
        pair.is_open = True
        pair.opened()

    def _lost(self, pair: _Pair, why: str) -> None:
        if not pair.thread.closed:
            self.close(pair.target)
            pair.failed(why)

    # ------------------------------------------------------------ in the pair's thread

    def _serve(self, pair: _Pair) -> None:
        """Raises what the group or the way to it is lost by."""
        connection = self._connected(pair)
        group: Group | None = None
        try:
            connection.say(
                Join(pair.target.worker, pair.target.incarnation, self._pool.block_bytes, pair.next)
            )
            group = make_group(self._make, connection, SENDER)
            connection.hear_joined()
            pair.thread.tell(self._opened, pair, connection)
            while (blocks := pair.waiting.get()) is not None:
                group.send(blocks, lambda: pair.thread.closed)
                del blocks  # they may be a pool's memory, and it is long until the next
        finally:
            pair.forget()
            if group is not None:
                group.end()
            connection.close()

    def _connected(self, pair: _Pair) -> Connection:
        """Raises CannotJoin."""
        where, host = pair.target.channels[self.name], parse_endpoint(pair.target.control).host
        if not where.isdecimal() or not 0 < int(where) < 1 << 16:
            raise CannotJoin("its address names no port")
        return connect(host, int(where), self._me, time.monotonic() + OPEN_S)


class _Pair:
    """This worker and one receiver. `next`: the number of the next block. `waiting`: for the thread; None: leave."""

    thread: PairThread

    def __init__(
        self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        self.target = target
        self.opened = opened
        self.failed = failed
        self.is_open = False
        self.next = secrets.randbits(_FIRST_BITS)
        self.waiting: SimpleQueue[list[torch.Tensor] | None] = SimpleQueue()

    def close(self) -> None:
        self.thread.close()
        self.waiting.put(None)

    def forget(self) -> None:
        """What waits refers to the pool's memory."""
        try:
            while True:
                self.waiting.get_nowait()
        except Empty:
            return


def make_group(make: MakeGroup, connection: Connection, rank: int) -> Group:
    """Raises CannotJoin with what it failed by."""
    store = PairStore(connection)
    try:
        return make(store, rank, connection.own_host, connection.left_s)
    except Exception as error:  # of torch's many kinds; or our own, of the store
        raise CannotJoin(store.fault or in_words(error)) from None
