"""What waits for a reader is known in bytes, and only what a slow one leaves waiting counts."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from common.errors import DeadlinePassed
from common.request import RequestId, TokenLogprobs
from coordinator.front import Delta
from coordinator.streams import MailboxStream

ID = RequestId("r")


def mailbox(cancelled: list[str]) -> MailboxStream:
    return MailboxStream([ID], lambda _: None, lambda _, reason: cancelled.append(reason))


def delta(index: int, top: int | None) -> Delta:
    logprobs = None
    if top is not None:
        alternatives = tuple((1000 + index + i, -0.5 - index - i) for i in range(top))
        logprobs = (TokenLogprobs(-0.25 - index, alternatives),)
    return Delta(ID, (70_000 + index,), logprobs, None, None)


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_what_waits_is_counted_about_as_the_memory_it_takes(top: int | None) -> None:
    stream = mailbox([])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for index in range(2000):
            stream.put(0, delta(index, top))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 < stream.waiting_bytes / taken < 1.6, (stream.waiting_bytes, taken)


def test_a_reader_that_asks_is_not_slow_however_much_comes_at_once() -> None:
    async def story() -> None:
        stream = mailbox([])
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        for index in range(100):
            stream.put(0, delta(index, 20))
        assert stream.waiting_bytes == 0
        await reading
        waiting = stream.waiting_bytes
        assert waiting > 0
        for _ in range(99):
            await stream.next()
        assert stream.waiting_bytes == 0

    asyncio.run(story())


def test_what_is_discarded_is_not_read_and_the_error_is_next() -> None:
    async def story() -> None:
        cancelled: list[str] = []
        stream = mailbox(cancelled)
        stream.put(0, delta(0, None))
        stream.discard()
        stream.fail(DeadlinePassed("too slow"))
        stream.cancel("too slow")
        assert stream.waiting_bytes == 0 and cancelled == ["too slow"]
        with pytest.raises(DeadlinePassed):
            await stream.next()

    asyncio.run(story())
