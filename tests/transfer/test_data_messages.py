"""What data messages consist of: one header for all blocks, or pairs with workers of an older minor version."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import zmq

import transfer.links
from common.effects import BLOCKS_AT_ONCE
from common.messages import Block, Blocks, Message, PeerAddress, Sender
from common.request import Incarnation, WorkerId
from common.wire import decode, encode
from tests.transfer.test_links import BLOCK_BYTES, CANCEL, KEY, coordinator_and, run, until
from transfer.channel import Arrived
from transfer.data_messages import blocks_in, frames_of
from transfer.inbox import Inbox

ME = Sender("prefill-0", Incarnation(1))

OLDEST = PeerAddress(
    WorkerId("d"), Incarnation(1), "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
)  # says nothing of it


def test_one_header_for_all_and_no_frames_where_the_channel_brings_the_bytes() -> None:
    headers = [Block(*KEY, index, part=0, checksum=7 * index, size=3, offset=9) for index in (4, 5)]
    rows = ((*KEY, 4, 0, 28, 3, 9), (*KEY, 5, 0, 35, 3, 9))
    *frames, header = frames_of([(one, b"abc") for one in headers], ME, one_header=True)
    assert frames == [b"abc", b"abc"] and decode(header) == (ME, Blocks("tcp", rows))
    (header,) = frames_of([(replace(one, channel="shm"), b"") for one in headers], ME, one_header=True)
    assert decode(header) == (ME, Blocks("shm", rows))
    pairs = frames_of([(one, b"abc") for one in headers], ME, one_header=False)
    assert pairs == [b"abc", encode(headers[0], ME), b"abc", encode(headers[1], ME)]


def test_blocks_share_messages_and_headers_as_far_as_the_receiver_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []

    def counting(
        frames: Sequence[zmq.Frame], inbox: Inbox, channels: Collection[str]
    ) -> tuple[Sender, list[Arrived]] | None:
        lengths.append(len(frames))
        return blocks_in(frames, inbox, channels)

    monkeypatch.setattr(transfer.links, "blocks_in", counting)

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            assert d.address.blocks_at_once == BLOCKS_AT_ONCE and d.address.one_header
            older = replace(d.address, one_header=OLDEST.one_header)
            oldest = replace(older, blocks_at_once=OLDEST.blocks_at_once)
            full, count = BLOCKS_AT_ONCE, 2 * BLOCKS_AT_ONCE + 1
            for target, wanted in (
                (d.address, [full + 1, full + 1, 2]),
                (older, [2 * full, 2 * full, 2]),
                (oldest, [2] * count),
            ):
                d.blocks.clear()
                lengths.clear()
                p.links.send_blocks(target, [(KEY, index, index % 4) for index in range(count)])
                await until(lambda: len(d.blocks) == count)
                assert [header.index for header, _ in d.blocks] == list(range(count))
                assert lengths == wanted

    run(story())


def test_of_a_message_with_a_bad_header_the_other_blocks_arrive() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.send_blocks(d.address, [(KEY, 0, 0)])
            await until(lambda: d.blocks)
            data = next(iter(p.links._ways.values()))._data
            good = [encode(replace(d.blocks[0][0], index=index), p.me) for index in (1, 2)]
            stranger = encode(d.blocks[0][0], Sender("prefill-9", Incarnation(1)))
            over_shm = encode(replace(d.blocks[0][0], channel="shm"), p.me)
            frame = bytes(BLOCK_BYTES)
            await data.send_multipart([frame, good[0], frame, b"junk", frame, good[1]])
            await data.send_multipart([frame, good[0], frame, stranger, frame, over_shm])
            await data.send_multipart([frame, good[0], frame])
            await data.send_multipart([frame, good[1]])
            await until(lambda: len(d.blocks) == 5)
            assert [header.index for header, _ in d.blocks] == [0, 1, 2, 1, 2]
            assert d.links._counters.values["protocol_violations_total"] == 4

    run(story())


def test_of_a_header_that_does_not_fit_its_message_nothing_arrives() -> None:
    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.send_blocks(d.address, [(KEY, 0, 0)])
            await until(lambda: d.blocks)
            data = next(iter(p.links._ways.values()))._data
            frame = bytes(BLOCK_BYTES)
            rows = tuple((*KEY, index, 0, 5, BLOCK_BYTES, 0) for index in range(BLOCKS_AT_ONCE + 1))

            async def say(frames: int, message: Message) -> None:
                await data.send_multipart([*[frame] * frames, encode(message, p.me)])

            await say(1, Blocks("tcp", rows[:2]))
            await say(3, Blocks("tcp", rows[:2]))
            await say(0, Blocks("tcp", ()))
            await say(len(rows), Blocks("tcp", rows))
            await say(2, Blocks("shm", rows[:2]))
            await say(2, CANCEL)
            await say(2, Blocks("tcp", rows[:2]))
            await until(lambda: len(d.blocks) == 3)
            assert [header.index for header, _ in d.blocks] == [0, 0, 1]
            assert [content for _, content in d.blocks[1:]] == [frame, frame]
            assert d.links._counters.values["protocol_violations_total"] == 6

    run(story())


def test_more_blocks_than_may_share_a_message_are_not_taken() -> None:
    """All of them would be copied in one go, and no step decided meanwhile."""

    async def story() -> None:
        async with coordinator_and("prefill-0", "decode-0") as (_, _, (p, d)):
            p.links.send_blocks(d.address, [(KEY, 0, 0)])
            await until(lambda: d.blocks)
            data = next(iter(p.links._ways.values()))._data
            pair = [bytes(BLOCK_BYTES), encode(d.blocks[0][0], p.me)]
            await data.send_multipart(pair * (BLOCKS_AT_ONCE + 1))
            await data.send_multipart(pair * BLOCKS_AT_ONCE)
            await until(lambda: len(d.blocks) == 1 + BLOCKS_AT_ONCE)
            assert d.links._counters.values["protocol_violations_total"] == 1

    run(story())
