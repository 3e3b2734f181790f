"""The channel that works everywhere: a block's bytes travel beside its header, over the data socket."""

from __future__ import annotations

from collections.abc import Callable

from common.messages import Block, ChannelName, PeerAddress, Sender
from common.request import Key
from kernels.block_bytes import checksums
from transfer.channel import BlockIn, Frame, Pool


class TcpSending:
    name: ChannelName = "tcp"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        """The data socket is there already."""
        opened()

    def close(self, target: PeerAddress) -> None: ...

    def pack(self, target: PeerAddress, key: Key, index: int, block: int) -> tuple[Block, Frame]:
        """The frame is the block itself: the socket copies it when it is sent, which is before this turn ends."""
        content = self._pool.block_bytes_view(block)
        (checksum,) = checksums([content])
        return Block(*key, index=index, part=0, checksum=checksum, size=len(content)), content

    def end(self) -> None: ...


class TcpReceiving:
    name: ChannelName = "tcp"
    where = ""

    def start(self) -> None: ...

    def take(self, header: Block, sender: Sender, frame: memoryview, deliver: BlockIn) -> None:
        deliver(header, sender, frame)

    def end(self) -> None: ...
