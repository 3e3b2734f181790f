"""A worker that comes back at once under its old name, over real sockets and a real control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zmq

from common.counters import Counters
from common.endpoints import Endpoint
from common.messages import Accepted, Decode, HeartbeatAck, Message, Registered, Sender
from common.request import Incarnation, Request, RequestId, SamplingParams, first_attempt_of_epoch, pack_ids
from coordinator.cluster import Cluster
from coordinator.control_plane import FRONT, ControlPlane
from coordinator.metrics import Metrics
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from tests.coordinator.cluster_bench import card, heartbeat
from transfer.links import Links

HERE = Endpoint("127.0.0.1", None)


class Life:
    """One life of worker d0, as far as its links go."""

    def __init__(self, incarnation: int, control: str) -> None:
        self.heard: list[Message] = []
        self.links = Links(Sender("d0", Incarnation(incarnation)), Counters(), block_bytes=100)
        address = self.links.bind(HERE)
        self.links.start(control, self._hear, self._hear, lambda *_: None)
        self.links.to_coordinator(replace(card("d0", incarnation), address=address))

    def _hear(self, message: Message, sender: Sender) -> None:
        self.heard.append(message)

    def heard_of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.heard if isinstance(message, kind)]


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def a_request(name: str) -> Request:
    return Request(RequestId(name), pack_ids([1, 2]), SamplingParams(max_tokens=4, seed=0), FRONT)


@pytest.mark.parametrize("old_one", ["is gone", "still speaks"])
def test_BR_040_a_worker_that_comes_back_at_once_under_its_name_gets_its_job(old_one: str) -> None:
    """The coordinator reads nothing between the two lives, and its old connection may even stand."""

    async def story() -> None:
        registry = Registry(tokenizer_hash="t", fronts={})
        cluster = Cluster(
            registry, WaitingQueue(max_requests=8, max_tokens=1000), first_attempt=first_attempt_of_epoch(1)
        )
        plane = ControlPlane(cluster, Metrics(("default",)), collocated=True, request_timeout_s=60)
        registry.set_front(FRONT, plane.bind_tokens(HERE))
        plane.start(HERE)
        control = plane._control.getsockopt_string(zmq.LAST_ENDPOINT)
        old = Life(1, control)
        try:
            await until(lambda: old.heard_of(Registered))
            await plane.submit([a_request("a")])
            await until(lambda: old.heard_of(Decode))
            if old_one == "is gone":
                await old.links.close()
            new = Life(2, control)
            await until(lambda: new.heard_of(Registered) and new.heard_of(Decode))
            (command,) = new.heard_of(Decode)
            assert isinstance(command, Decode) and command.id == "a", "what the old life had"
            new.links.to_coordinator(Accepted(*command.key))
            await plane.submit([a_request("b")])
            await until(lambda: len(new.heard_of(Decode)) == 2)
            if old_one == "still speaks":
                old.links.to_coordinator(heartbeat())
                await until(lambda: old.heard_of(HeartbeatAck))
                (ack,) = old.heard_of(HeartbeatAck)
                assert isinstance(ack, HeartbeatAck) and not ack.known, "and the answer goes to who asked"
                assert len(old.heard_of(Decode)) == 1
            assert [(w.incarnation, w.state) for w in registry.all()] == [(2, "ready")]
            await new.links.close()
        finally:
            if old_one == "still speaks":
                await old.links.close()
            plane.end_all()
            await plane.close()

    asyncio.run(asyncio.wait_for(story(), 20))
