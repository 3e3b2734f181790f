"""The channel that works everywhere: a block's bytes travel beside its header, over the data socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.messages import Block, ChannelName, PeerAddress, Sender
from kernels.block_bytes import checksums
from transfer.channel import Arrived, BlocksIn, Frame, Outbound, Pool


class TcpSending:
    name: ChannelName = "tcp"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        """The data socket is there already."""
        opened()

    def close(self, target: PeerAddress) -> None: ...

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        """A frame is the block itself: the socket copies it when it is sent, which is before this turn ends."""
        frames = self._pool.read_blocks([block for _, _, block in blocks])
        return [
            (Block(*key, index=index, part=0, checksum=checksum, size=len(frame)), frame)
            for (key, index, _), frame, checksum in zip(blocks, frames, checksums(frames), strict=True)
        ]

    async def end(self) -> None: ...


class TcpReceiving:
    name: ChannelName = "tcp"
    where = ""

    def start(self) -> None: ...

    def take(self, sender: Sender, came: Sequence[Arrived], deliver: BlocksIn) -> None:
        deliver(sender, came)

    async def end(self) -> None: ...
