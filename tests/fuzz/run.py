"""`make fuzz`: so many mutated messages at every socket (`python -m tests.fuzz.run 100000 [door]`)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import uvloop

from tests.fuzz.attack import Attack, Report
from tests.fuzz.coordinator_scene import coordinator_scene
from tests.fuzz.counting import counting
from tests.fuzz.decode_scene import decode_scene
from tests.fuzz.prefill_scene import prefill_scene
from tests.fuzz.scenes import Scene

Stage = Callable[[], AbstractAsyncContextManager[Scene]]
STAGES: tuple[Stage, ...] = (coordinator_scene, decode_scene, prefill_scene)


async def attack_all(stage: Stage, count: int, seed: int, only: str = "") -> AsyncIterator[Report]:
    """Every door of one scene, one after the other."""
    with counting():
        async with stage() as scene:
            for door in scene.doors:
                if only in door.name:
                    yield await Attack(scene, door, seed).run(count)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    logging.disable(logging.CRITICAL)
    began = time.monotonic()

    async def all_stages() -> None:
        for stage in STAGES:
            async for report in attack_all(stage, count, seed=1, only=only):
                print(report, flush=True)

    uvloop.run(all_stages())
    print(f"no crash, no growth, nothing disturbed; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
