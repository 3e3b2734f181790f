"""`python -m bench.gpu_check.prefill_end MODEL cuda|cpu`: computes a story's prompts, gives their blocks to who asks.

Says `{"firsts": …}` when the prompts are computed. A line `{"channel": …, "target": …}` on its input is a giving of the
whole pool over that channel, answered with the seconds of its last round, or with why it has no such channel. Ends with
its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from bench.gpu_check.channels import ROUNDS
from bench.gpu_check.driving import prefill
from bench.gpu_check.paths import STORIES, poison
from bench.gpu_check.places import cpu_place, gpu_place
from bench.gpu_check.weights import make_model, make_runner
from bench.transfer_ends import Giver
from common.errors import BadConfiguration
from common.messages import PeerAddress
from kernels.runner import ModelRunner
from transfer.segment import PoolSegment


def main() -> None:
    name, device = sys.argv[1:]
    place, story = gpu_place() if device == "cuda" else cpu_place(), STORIES[name]
    model = make_model(name, place)
    segment = PoolSegment()
    blocks, rows = story.num_blocks(name), len(story.lengths)
    runner = make_runner(model, blocks, rows, story.max_model_len, eager=True, memory=segment.allocate)
    poison(runner)
    firsts = prefill(runner, story.asked(name), story.tables(name), story.chunk)
    _say({"firsts": firsts})
    for line in sys.stdin:
        said = json.loads(line)
        try:
            seconds = asyncio.run(_give(said["channel"], runner, segment, PeerAddress(**said["target"])))
            _say({"seconds": seconds})
        except BadConfiguration as error:
            _say({"refused": str(error)})


async def _give(channel: str, runner: ModelRunner, segment: PoolSegment, target: PeerAddress) -> float:
    """Raises BadConfiguration where there is no such channel from this pool."""
    began: list[float] = []

    async def rounds() -> AsyncIterator[int]:
        for number in range(ROUNDS):
            began.append(time.perf_counter())
            yield number
        began.append(time.perf_counter())

    cache = runner.cache
    giver = Giver(channel, cache, segment, cache.num_blocks, cache.block_bytes, None, cache.on_device)
    await giver.run(target, rounds())
    return began[-1] - began[-2]


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
