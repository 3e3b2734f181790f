"""A PULL socket that is read without futures loses nothing, keeps order and leaves others their turns."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from transfer.pulling import Pull


def test_all_that_came_before_and_after_is_heard_in_order_and_timers_go_on() -> None:
    async def story() -> None:
        context = zmq.asyncio.Context()
        pull = context.socket(zmq.PULL)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push: zmq.Socket[bytes] = zmq.Socket.shadow(context.socket(zmq.PUSH))
        push.connect(f"tcp://127.0.0.1:{port}")
        heard: list[bytes] = []
        ticks = 0

        def hear(data: bytes) -> None:
            heard.append(data)
            for _ in range(2000):  # so that a turn ends long before the messages do
                pass

        for number in range(20):
            push.send(b"%d" % number)
        await asyncio.sleep(0.1)  # they are there before anybody listens
        pull.getsockopt(zmq.EVENTS)  # and whoever asks is told that once
        reading = Pull(pull, hear)
        await asyncio.sleep(0.3)
        assert len(heard) == 20
        push.send_multipart([b"two", b"frames"])
        for number in range(20, 900):
            push.send(b"%d" % number)
        async with asyncio.timeout(10):
            while len(heard) < 901:
                await asyncio.sleep(0)
                ticks += 1
        assert heard == [b"%d" % n for n in range(20)] + [b""] + [b"%d" % n for n in range(20, 900)]
        assert ticks > 10
        await asyncio.sleep(0.05)
        push.send(b"after a pause")
        await asyncio.sleep(0.1)
        assert heard[-1] == b"after a pause"
        reading.end()
        reading.end()
        push.send(b"for nobody")
        await asyncio.sleep(0.05)
        assert heard[-1] == b"after a pause"
        push.close(linger=0)
        pull.close(linger=0)
        context.destroy(linger=0)

    asyncio.run(story())
