"""What waits for a reader is known in bytes, and only what a slow one leaves waiting counts."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from common.errors import DeadlinePassed, RequestFailed
from common.messages import FinishReason, TokenRow, Tokens
from common.request import Attempt, RequestId, TokenLogprobs
from coordinator.front import Delta, Front
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


def test_a_plain_token_that_is_waited_for_is_relayed_and_none_overtakes_another() -> None:
    async def story() -> None:
        stream, taken, room = mailbox([]), [], True

        def take(_: int, token_id: int) -> bool:
            if room:
                taken.append(token_id)
            return room

        stream.relay(take)
        stream.put(0, delta(0, None))  # nobody waits for it
        assert (await stream.next()).ids == (70_000,)
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        for index in (1, 2):
            stream.put(0, delta(index, None))
        assert taken == [70_001, 70_002] and not reading.done()
        room = False
        stream.put(0, delta(3, None))
        room = True
        stream.put(0, delta(4, None))  # behind one that waits
        assert (await reading).ids == (70_003,) and (await stream.next()).ids == (70_004,)
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(0, delta(5, 2))
        assert (await reading).logprobs is not None and taken == [70_001, 70_002]

    asyncio.run(asyncio.wait_for(story(), 5))


def test_what_the_relay_raises_its_own_reader_hears() -> None:
    async def story() -> None:
        stream = mailbox([])

        def fails(choice: int, token_id: int) -> bool:
            raise RequestFailed(f"{choice}: {token_id}")

        stream.relay(fails)
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(0, delta(0, None))
        with pytest.raises(RequestFailed, match="0: 70000"):
            await reading

    asyncio.run(asyncio.wait_for(story(), 5))


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


def test_BR_143_each_reader_ends_right_after_its_own_finish_and_gets_nothing_of_anothers() -> None:
    """Eight answers of different lengths in the same steps; one reader takes nothing until the others are done."""
    names = [RequestId(f"r{number}") for number in range(8)]
    front = Front()
    streams = {name: MailboxStream([name], lambda _: None, lambda *_: None) for name in names}

    async def read(stream: MailboxStream) -> list[int]:
        ids: list[int] = []
        while True:
            delta = await stream.next()
            ids += delta.ids
            if delta.finish is not None:
                return ids

    def step_of(step: int) -> Tokens:
        rows = []
        for number, name in enumerate(names):
            if step <= number:
                finish: FinishReason | None = "length" if step == number else None
                rows.append(TokenRow(name, Attempt(1), step, (100 * number + step,), finish=finish))
        return Tokens(step, tuple(rows))

    async def scene() -> None:
        for name in names:
            front.open(name)
        slow, *fast = streams.values()
        readers = [asyncio.create_task(read(stream)) for stream in fast]
        for step in range(8):
            deltas, _ = front.accept(step_of(step), "d0", 1, float(step))
            for delta in deltas:
                streams[delta.id].put(0, delta)
            for _ in range(3):
                await asyncio.sleep(0)
            assert [reader.done() for reader in readers] == [step >= number for number in range(1, 8)]
        for number, reader in enumerate(readers, 1):
            assert reader.result() == [100 * number + step for step in range(number + 1)]
        assert await read(slow) == [0]

    asyncio.run(asyncio.wait_for(scene(), 5))
