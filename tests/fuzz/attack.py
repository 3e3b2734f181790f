"""Throws mutated messages and noise at one door of a scene, and says what came of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from random import Random

from common.errors import ProtocolViolation
from common.wire import decode, encode
from tests.fuzz.corpus import Corpus
from tests.fuzz.counting import anonymous_bytes, descriptors, overgrown
from tests.fuzz.mutations import Mutator
from tests.fuzz.scenes import Door, Scene

BATCH = 64
LATE_S = 0.1  # after which what was not read is lost on the way: whoever it was for has gone
REST_S = 20.0
MAX_GROWTH_BYTES = 32 << 20  # of anonymous memory, over the second half


@dataclass(frozen=True, slots=True)
class Report:
    door: str
    said: int
    read: int
    taken: int
    honest: int
    seconds: float
    grown_bytes: int

    def __str__(self) -> str:
        refused = self.read - self.taken
        return (
            f"{self.door:<22} said {self.said:>7,}  taken {self.taken:>7,}  refused {refused:>7,}  "
            f"{self.said / self.seconds:>7,.0f}/s  memory {self.grown_bytes / 2**20:+.1f} MB  "
            f"{self.honest} honest requests beside it, exact"
        )


class Attack:
    def __init__(self, scene: Scene, door: Door, seed: int) -> None:
        random = Random(f"{door.name} {seed}")
        self._random = random
        self._scene = scene
        self._door = door
        self._corpus = Corpus(random, scene.ids, scene.attempts)
        names = ("decode-0", "prefill-0", "evil", "live", "coordinator", "", "x" * 300)
        # Not 1, which is what honest ones have: who knows that has been told, or reads their traffic.
        self._mutator = Mutator(random, names, (0, 2, 5, 99, -1, (1 << 63) - 1))

    def _next(self) -> tuple[int, list[bytes]]:
        """Whose, and its frames; never a legitimate command."""
        while True:
            n = self._random.randrange(len(self._door.who))
            kinds = self._door.kinds if self._random.random() < 0.8 else ()
            message = self._corpus.message(kinds)
            data = self._mutator.mutate(encode(message, self._door.who[n]))
            if not self._is_legitimate(data):
                return n, self._mutator.frames(data)

    def _is_legitimate(self, data: bytes) -> bool:
        try:
            return self._door.legitimate(decode(data)[1])
        except ProtocolViolation:
            return False

    async def run(self, count: int) -> Report:
        """Raises AssertionError when something but counting came of it."""
        scene, inbox, began = self._scene, self._scene.inbox, time.monotonic()
        read, taken, done = inbox.read_count, inbox.taken, scene.done
        half_bytes = 0
        for said in range(0, count, BATCH):
            await self._batch(min(BATCH, count - said))
            scene.work()
            if not half_bytes and said >= count // 2:
                half_bytes, fds = anonymous_bytes(), descriptors()
            assert not (grown := overgrown(scene.root)), grown
        await self._until_at_rest()
        assert "internal_errors_total" not in inbox.counters.values, "a handler raised"
        grown_bytes = anonymous_bytes() - half_bytes
        assert grown_bytes < MAX_GROWTH_BYTES, f"{grown_bytes >> 20} MB more than half-way"
        assert descriptors() <= fds + 12, "descriptors were left open"
        assert scene.done > done, "no honest request came to its end: the fuzz shows nothing"
        return Report(
            self._door.name,
            count,
            inbox.read_count - read,
            inbox.taken - taken,
            scene.done - done,
            time.monotonic() - began,
            grown_bytes,
        )

    async def _batch(self, count: int) -> None:
        """Says it and waits until it was read, so that nothing piles up but what the objects keep."""
        inbox = self._scene.inbox
        before = inbox.read_count
        for _ in range(count):
            self._door.say(*self._next())
        until = time.monotonic() + LATE_S
        await asyncio.sleep(0.001)
        while self._door.counted and inbox.read_count < before + count and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def _until_at_rest(self) -> None:
        until = time.monotonic() + REST_S
        while not self._scene.rest():
            assert time.monotonic() < until, f"not at rest {REST_S:g} s after the attack"
            await asyncio.sleep(0.01)
