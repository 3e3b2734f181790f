"""A model's tokens when another process computes its prompts, and their blocks come over a channel of the server's.

    here: a decode worker's pool ◀── tcp, shm, ipc ── another process (`prefill_end`): model, pool, prompts computed

The ends are those of `bench/transfer_ends.py`: sender, receiver, links and checksums of production. A channel that is
not there, or that this pool cannot have, is named and passed over.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, get_args

from bench.gpu_check.driving import decode
from bench.gpu_check.findings import Check, Finding, Skipped, Speed
from bench.gpu_check.paths import Pools, poison
from bench.gpu_check.roofs import Roofs

CHANNELS = ("tcp", "shm", "ipc")
NEEDED = ("pydantic", "zmq")
"""Beside what kernels need; where they are missing they travel as wheels (gpu_check.sh)."""
START_LIMIT_S = 120.0
MOVE_LIMIT_S = 40.0
END_LIMIT_S = 10.0
ROUNDS = 2
"""The first opens connections and touches memory."""


def checks(pools: Pools, roofs: Roofs) -> Iterator[Finding]:
    part = f"{pools.name} model"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield Skipped(f"{part} over {', '.join(CHANNELS)}", f"no package {' and '.join(missing)} here")
        return
    wanted = pools.said(pools.asked, chunk=pools.story.chunk)
    yield from asyncio.run(_over_all(pools, roofs, wanted))


async def _over_all(pools: Pools, roofs: Roofs, wanted: Sequence[Sequence[int]]) -> list[Finding]:
    found: list[Finding] = []
    async with _prefill_end(pools) as (end, firsts):
        for channel in CHANNELS:
            part = f"{pools.name} model over {channel}"
            try:
                seconds = await _moved(channel, pools, end)
            except ChannelNotThere as error:
                found.append(Skipped(part, str(error)))
                continue
            except (RuntimeError, TimeoutError) as error:  # the other process is of no more use
                why = f"{type(error).__name__} {error}".strip()
                found.append(Check(part, "all blocks arrive", math.nan, 0, why))
                break
            said = decode(pools.decode, pools.asked, firsts, pools.tables)
            wrong = sum(
                ours != theirs
                for a, b in zip(said, wanted, strict=True)
                for ours, theirs in zip(a, b, strict=True)
            )
            found.append(Check(part, "tokens that are others", wrong, 0))
            layout, blocks = pools.decode.layout, pools.decode.cache.num_blocks
            moved = blocks * layout.block_bytes
            what = f"{blocks} blocks of {layout.block_bytes} bytes, checksums on"
            found.append(
                Speed(part, what, seconds, moved / seconds, "copy", roofs.share(seconds, 2 * moved, 0))
            )
    return found


class ChannelNotThere(Exception):
    """Why not, as the server would say it."""


async def _moved(channel: str, pools: Pools, end: asyncio.subprocess.Process) -> float:
    """All blocks of the other process's pool are in ours, in the same places. Returns seconds of the last round. Raises
    ChannelNotThere."""
    # Imported here: they need what a GPU machine may lack.
    from bench.transfer_ends import Taker
    from common.errors import BadConfiguration
    from common.messages import ChannelName

    if channel not in get_args(ChannelName):
        raise ChannelNotThere("no such channel in this release")
    poison(pools.decode)
    try:
        cache = pools.decode.cache
        taker = Taker(channel, cache, cache.block_bytes, None, cache.on_device)
    except BadConfiguration as error:
        raise ChannelNotThere(str(error)) from error
    async with taker.taking() as address:
        said = await _ask(end, {"channel": channel, "target": asdict(address)}, MOVE_LIMIT_S)
    if "refused" in said:
        raise ChannelNotThere(said["refused"])
    return float(said["seconds"])


@asynccontextmanager
async def _prefill_end(pools: Pools) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[int]]]:
    """The other process, once its prompts are computed, and their first tokens. It ends with its input."""
    device = "cuda" if pools.model.device.type == "cuda" else "cpu"
    end = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.gpu_check.prefill_end", pools.name, device),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        ready = await _ask(end, None, START_LIMIT_S)
        yield end, ready["firsts"]
    finally:
        assert end.stdin is not None
        end.stdin.close()
        try:
            await asyncio.wait_for(end.wait(), END_LIMIT_S)
        except TimeoutError:
            end.kill()
            await end.wait()


async def _ask(
    end: asyncio.subprocess.Process, what: dict[str, Any] | None, limit_s: float
) -> dict[str, Any]:
    """Its next line. Raises RuntimeError where it ended, TimeoutError where it says nothing in time."""
    assert end.stdin is not None and end.stdout is not None
    if what is not None:
        end.stdin.write(json.dumps(what).encode() + b"\n")
        await end.stdin.drain()
    line = await asyncio.wait_for(end.stdout.readline(), limit_s)
    if not line:
        raise RuntimeError("the process that computes prompts has ended")
    said: dict[str, Any] = json.loads(line)
    return said
