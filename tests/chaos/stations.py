"""Brings a real request to a station of the plan and keeps it there, by what the proxy holds back or by a process
that is frozen.

A frozen process stands still for less than the time after which it is taken for lost, so that is no fault of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.chaos.plan import Station
from tests.chaos.rules import Rule
from tests.chaos.scene import BIG, BIG_FILLER, FILLER, LONG, QUEUED, SHORT, Scene, Shape
from tests.chaos.service import CHUNK_TOKENS

BLOCK_TOKENS = 16
BLOCKS_OF_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
CHUNKS = LONG.prompt_tokens // CHUNK_TOKENS


def waiting(scene: Scene) -> None:
    """Both prefill workers have been given all they may have, and do not know it yet."""
    for rule in [scene.fill(LONG, scene.hold, "Prefill") for _ in range(2)]:
        rule.wait()
    scene.ask()
    until(lambda: scene.service.metric("num_requests_waiting", worker="coordinator") >= 1)


def queued(scene: Scene) -> None:
    """Behind a step of another request; the worker that has both is frozen."""
    for rule in [scene.fill(FILLER, scene.see, "Started") for _ in range(2)]:
        rule.wait()
    accepted = scene.see("Accepted", then=lambda: scene.freeze("P"))
    started = scene.see("Started")
    scene.ask()
    accepted.wait()
    reached(not started.acted, "it was computed at once")


def first_chunk(scene: Scene) -> None:
    _in_chunk(scene, scene.see("Started", then=lambda: scene.freeze("P")))


def middle_chunk(scene: Scene) -> None:
    _in_chunk(scene, _block_of_chunk(scene, CHUNKS // 2))


def last_chunk(scene: Scene) -> None:
    _in_chunk(scene, _block_of_chunk(scene, CHUNKS - 1))


def _block_of_chunk(scene: Scene, before: int) -> Rule:
    """Freezes the prefill worker when the last block of the first `before` chunks has left it."""

    def fits(message: Any) -> bool:
        return bool(message.index + 1 >= before * BLOCKS_OF_CHUNK)

    return scene.see("Block", fits=fits, then=lambda: scene.freeze("P"))


def _in_chunk(scene: Scene, rule: Rule) -> None:
    said = scene.see("Tokens")
    scene.ask()
    rule.wait()
    reached(not said.acted, "its prompt is computed already")


def prefilled(scene: Scene) -> None:
    """Its first token is out, and no decode worker has heard of it."""
    scene.hold("Offer")
    scene.ask().wait_tokens(1)


def sending(scene: Scene) -> None:
    """The blocks of its last chunk are on their way."""
    first_of_last = (CHUNKS - 1) * BLOCKS_OF_CHUNK
    held = scene.hold("Block", fits=lambda message: message.index >= first_of_last)
    scene.ask().wait_tokens(1)
    held.wait()


def delivered(scene: Scene) -> None:
    """The decode worker has said so, and is frozen before its next step."""
    rule = scene.see("Delivered", then=lambda: scene.freeze("D"))
    scene.ask()
    rule.wait()


def decoding(scene: Scene) -> None:
    scene.ask().wait_tokens(5)


def preempted(scene: Scene) -> None:
    """Put out of the batch by one that came earlier, on the worker that it was given to: each decode worker has one
    that fills half of it, and does not begin to grow before the request is there."""
    for rule in [scene.fill(BIG_FILLER, scene.hold, "Handover") for _ in range(2)]:
        rule.wait()
    there = scene.see("Delivered")
    put_out = scene.see("Heartbeat", phase="preempted")
    scene.ask()
    there.wait()
    scene.go_on()
    put_out.wait(60)


def ended(scene: Scene) -> None:
    """The client has the whole answer, and the coordinator has not heard from the worker that it let go."""
    scene.hold("Ended", fits=lambda message: message.outcome == "finished")
    scene.ask()
    scene.stream.answer()


SHAPES: dict[Station, Shape] = {
    **dict.fromkeys(Station, LONG),
    Station.QUEUED: QUEUED,
    Station.DECODING: SHORT,
    Station.PREEMPTED: BIG,
    Station.ENDED: SHORT,
}
"""Of the request that is brought to each."""

STATIONS: dict[Station, Callable[[Scene], None]] = {
    Station.WAITING: waiting,
    Station.QUEUED: queued,
    Station.FIRST_CHUNK: first_chunk,
    Station.MIDDLE_CHUNK: middle_chunk,
    Station.LAST_CHUNK: last_chunk,
    Station.PREFILLED: prefilled,
    Station.SENDING: sending,
    Station.DELIVERED: delivered,
    Station.DECODING: decoding,
    Station.PREEMPTED: preempted,
    Station.ENDED: ended,
}


class NotReached(AssertionError):
    """The phase was over too soon: nothing is said by that, and the cell may try again."""


def reached(there: bool, otherwise: str) -> None:
    if not there:
        raise NotReached(otherwise)


def until(done: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)
