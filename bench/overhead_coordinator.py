"""What one request costs the coordinator's decisions, with so many waiting: admission, queue, routing, dispatch, end.

The production `Cluster` with a pair of workers that only exist as registrations. Its batch is full: one request ends,
the next in line is dispatched in its place, a new one comes in. So each round is one request's whole way, and the
queue stays as long as it was.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass

from bench.overhead_workers import FRONT, request
from common.effects import Effect, ToWorker
from common.front_messages import Progress, RequestFinished, Submit
from common.messages import Accepted, Ended, Message, PeerAddress, Prefill, Register, Role, Sender, Started
from common.request import Incarnation, Key, WorkerId, first_attempt_of_epoch
from coordinator.cluster import Cluster
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry

PROMPT_TOKENS = 256
MAX_TOKENS = 64
BATCH = 16
LOOK_EVERY_S = 0.25
LIFE = Incarnation(1)
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Processor microseconds with `waiting` requests in line. `dispatch_us`: admitted, queued, routed, dispatched.
    `rest_us`: all else of its way but its tokens: answers, moves, end. `look_us`: one look at what time does, four of
    them a second."""

    waiting: int
    dispatch_us: float
    rest_us: float
    look_us: float


def request_cost(waiting: int, *, requests: int = 300, rounds: int = 5) -> RequestCost:
    """The least of `rounds` means over `requests`."""
    scene = _Scene(waiting)
    costs = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            scene.dispatch_ns = scene.rest_ns = scene.look_ns = 0
            for _ in range(requests):
                scene.one_request()
            scene.look()
            costs.append((scene.dispatch_ns / requests, scene.rest_ns / requests, scene.look_ns))
    finally:
        gc.enable()
    dispatch_us, rest_us, look_us = (min(column) / 1000 for column in zip(*costs, strict=True))
    return RequestCost(waiting, dispatch_us, rest_us, look_us)


class _Scene:
    def __init__(self, waiting: int) -> None:
        self._cluster = Cluster(
            Registry(tokenizer_hash=None, fronts={FRONT: "f"}),
            WaitingQueue(max_requests=waiting + 10 * BATCH, max_tokens=1 << 40),
            first_attempt=first_attempt_of_epoch(1),
        )
        self._now = 0.0
        self._count = 0
        self._running: deque[Key] = deque()
        self.dispatch_ns = self.rest_ns = self.look_ns = 0
        for role in ROLES:
            self._cluster.from_worker(_card(role), Sender(role, LIFE), self._now)
        for _ in range(BATCH + waiting):
            self._answer(self._cluster.submit(self._new(), self._now))
        assert self._cluster.num_waiting() == waiting and len(self._running) == BATCH

    def one_request(self) -> None:
        """The oldest ends, and the first in line takes its place; a new one comes in and finds no room."""
        self._now += 0.001
        began = time.process_time_ns()
        finished = RequestFinished(self._running.popleft()[0], "length")
        told = self._cluster.from_front(finished, self._now)
        self._cluster.submit(self._new(), self._now)
        dispatched = time.process_time_ns()
        self._answer(told)
        self.dispatch_ns += dispatched - began
        self.rest_ns += time.process_time_ns() - dispatched

    def look(self) -> None:
        self._now += LOOK_EVERY_S
        began = time.process_time_ns()
        self._cluster.turn(self._now)
        self.look_ns = time.process_time_ns() - began

    def _new(self) -> Submit:
        self._count += 1
        return Submit((request(self._count, PROMPT_TOKENS, MAX_TOKENS),))

    def _answer(self, told: list[Effect]) -> None:
        """What workers and the front say of those that were dispatched, up to their second token."""
        for effect in told:
            if isinstance(effect, ToWorker) and isinstance(effect.message, Prefill):
                key, target = effect.message.key, effect.message.target
                self._hear("prefill", Accepted(*key, target))
                self._hear("prefill", Started(*key, "prefilling"))
                self._cluster.from_front(Progress(((key[0], 0, (5,)),)), self._now)
                self._hear("decode", Started(*key, "decode_ready"))
                self._hear("prefill", Ended(*key, "handed_over"))
                self._cluster.from_front(Progress(((key[0], 1, (6,)),)), self._now)
                self._running.append(key)

    def _hear(self, role: Role, message: Message) -> None:
        self._cluster.from_worker(message, Sender(role, LIFE), self._now)


def _card(role: Role) -> Register:
    return Register(
        role=role,
        fingerprint={},
        address=PeerAddress(WorkerId(role), LIFE, "c", "d"),
        channels=("tcp",),
        blocks_total=1 << 20,
        block_size=16,
        block_bytes=1,
        max_model_len=8192,
        max_num_seqs=BATCH,
        max_num_batched_tokens=1 << 20,
        device="cpu",
        threads=1,
        pid=1,
        host="bench",
        versions={},
    )
