"""How blocks share a message on the data socket: their bytes, and what says which they are.

    one header   [bytes of a block] … [Blocks]              where the receiver's address says that it knows this (2.3)
    pairs        [bytes of a block] [Block], and so on      for a receiver of an older minor version, and from a sender

Where the channel brings the bytes in another way, one header stands alone, and each frame of a pair is empty.

Why: eight headers of a message were sixteen frames, each of them a call, and eight maps to write, read and check. That
was more than a third of a block's time over shm, at both ends (`python -m bench.transfer_speed`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

import zmq

from common.effects import BLOCKS_AT_ONCE
from common.errors import ProtocolViolation
from common.messages import Block, Blocks, Message, Sender
from common.wire import encode
from transfer.channel import Arrived, Frame
from transfer.inbox import Inbox

HEADER_BYTES = 4096 * BLOCKS_AT_ONCE
_ROW = attrgetter("id", "attempt", "index", "part", "checksum", "size", "offset")


def frames_of(packed: Sequence[tuple[Block, Frame]], me: Sender, *, one_header: bool) -> list[Frame]:
    """One message of blocks that are all of one channel."""
    if not one_header:
        return [part for header, frame in packed for part in (frame, encode(header, me))]
    frames = [frame for _, frame in packed if len(frame)]
    assert len(frames) in (0, len(packed)), (
        "a channel sends the bytes of all blocks beside the header, or of none"
    )
    rows = tuple(_ROW(header) for header, _ in packed)
    return [*frames, encode(Blocks(packed[0][0].channel, rows), me)]


def blocks_in(
    frames: Sequence[zmq.Frame], inbox: Inbox, channels: Collection[str]
) -> tuple[Sender, list[Arrived]] | None:
    """The blocks of a message and who sent them, all over one of `channels`; None where it has none. What is not valid
    in it is counted and left out; of blocks that share a header, all are."""
    read = inbox.read(frames[-1].buffer, kinds=(Block, Blocks))
    if read is not None and isinstance(header := read[1], Blocks):
        try:
            return read[0], _sharing_a_header(header, frames[:-1], channels)
        except ProtocolViolation as error:
            inbox.violated(error)
            return None
    if len(frames) % 2 or len(frames) > 2 * BLOCKS_AT_ONCE:
        if read is not None:
            inbox.violated(ProtocolViolation(f"{len(frames)} frames where blocks with headers belong"))
        return None
    heads = [inbox.read(head.buffer, kinds=(Block,)) for head in frames[1:-1:2]]
    return _pairs(frames[::2], [*heads, read], inbox, channels)


def _sharing_a_header(
    header: Blocks, frames: Sequence[zmq.Frame], channels: Collection[str]
) -> list[Arrived]:
    count, channel = len(header.rows), header.channel
    if not 0 < count <= BLOCKS_AT_ONCE or len(frames) not in (0, count):
        raise ProtocolViolation(f"{len(frames)} frames for {count} blocks")
    if channel not in channels:
        raise ProtocolViolation(f"blocks over {channel}, which was not offered")
    sources = [memoryview(frame.buffer) for frame in frames] or [memoryview(b"")] * count
    return [
        (Block(id, attempt, index, part, checksum, size, channel, offset), source)
        for (id, attempt, index, part, checksum, size, offset), source in zip(
            header.rows, sources, strict=True
        )
    ]


def _pairs(
    frames: Sequence[zmq.Frame],
    heads: Sequence[tuple[Sender, Message] | None],
    inbox: Inbox,
    channels: Collection[str],
) -> tuple[Sender, list[Arrived]] | None:
    """A header that is not valid, or not of the first one's sender and channel, is dropped with its frame."""
    came: list[Arrived] = []
    sender: Sender | None = None
    for frame, read in zip(frames, heads, strict=True):
        if read is None:
            continue
        one, header = read
        assert isinstance(header, Block)
        sender = sender or one
        if one != sender or (came and header.channel != came[0][0].channel):
            inbox.violated(ProtocolViolation("blocks of several in one message"))
        elif header.channel not in channels:
            inbox.violated(ProtocolViolation(f"a block over {header.channel}, which was not offered"))
        else:
            came.append((header, memoryview(frame.buffer)))
    return (sender, came) if sender is not None and came else None
