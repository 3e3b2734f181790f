"""The channel that works everywhere: a block's bytes travel beside its header, over the data socket."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from common.messages import Block, ChannelName, PeerAddress, Sender
from common.request import Key
from transfer.channel import BlockIn, Pool


class TcpSending:
    name: ChannelName = "tcp"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        """The data socket is there already."""
        opened()

    def close(self, target: PeerAddress) -> None: ...

    def pack(self, target: PeerAddress, key: Key, index: int, block: int) -> tuple[Block, bytes]:
        """Copies the block: its memory may be another request's a moment later."""
        frame = bytes(self._pool.block_bytes_view(block))
        checksum = xxhash.xxh3_64_intdigest(frame)
        return Block(*key, index=index, part=0, checksum=checksum, size=len(frame)), frame

    def end(self) -> None: ...


class TcpReceiving:
    name: ChannelName = "tcp"
    where = ""

    def start(self) -> None: ...

    def take(self, header: Block, sender: Sender, frame: memoryview, deliver: BlockIn) -> None:
        deliver(header, sender, frame)

    def end(self) -> None: ...
