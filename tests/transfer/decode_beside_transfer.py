"""How much a saturated incoming link slows decoding (issue 4, point 8).

    python -m tests.transfer.decode_beside_transfer [--channel tcp|shm] [--rounds 4] [--unpaced]

A real decode worker of the default model with one thread computes a steady batch; a process beside it sends blocks of
that model's size as fast as their credits allow. Quiet and loaded stretches alternate; what counts is the median of
their p99s, since on a shared machine one bad stretch says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import uvloop

import transfer.inbox
from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.endpoints import Endpoint
from common.messages import Decode, Offer, PeerAddress, Sender
from common.request import Incarnation, Key, Request, SamplingParams, pack_ids
from decode_node.worker import DecodeWorker
from kernels.cache import CacheLayout
from kernels.loading import load_for_worker
from tests.fuzz.scenes import FRONT, HonestCoordinator, key_of, worker_running
from tests.transfer.bare_pool import BarePool
from tests.transfer.channel_ends import Giver, until
from transfer.isolating import IsolatingSteps
from transfer.links import Links
from transfer.own_channels import receiving_ends
from transfer.receiver import TransferReceiver

LIMIT = 1.25
ROWS = 8
PROMPT_TOKENS = 128
MAX_TOKENS = 1500
BLOCKS_EACH = 24  # of one transfer
STRETCH_S = 4.0
SETTLE_S = 0.5


# ---------------------------------------------------------------- the sender's process


async def saturate(target: PeerAddress, channel: str, block_bytes: int) -> None:
    """Sends transfers that are cancelled as soon as their blocks are out, for as long as input lasts."""
    pool = BarePool(BLOCKS_EACH, block_bytes)
    pool.fill()
    giver = Giver(pool, channel, incarnation=time.time_ns() // 1000)
    giver.start()
    count = 0
    paused = asyncio.Event()

    def heard() -> None:
        line = sys.stdin.readline().strip()
        if line == "go":
            paused.set()
        elif line == "pause":
            paused.clear()
        else:
            asyncio.get_running_loop().stop()

    asyncio.get_running_loop().add_reader(sys.stdin, heard)
    open_keys: list[Key] = []
    while True:
        await paused.wait()
        while len(open_keys) < 3:
            count += 1
            which = key_of(f"load-{count}", 1)
            _offer(giver, which, target)
            open_keys.append(which)
        giver.turn()
        for which in list(open_keys):
            out = giver.sender._outgoing.get(which)
            sent = out is not None and out.blocks_sent >= BLOCKS_EACH and not giver.sender.bytes_in_flight
            if out is None or sent:
                giver.cancel(which)
                open_keys.remove(which)
        await asyncio.sleep(0.001)


def _offer(giver: Giver, which: Key, target: PeerAddress) -> None:
    now = time.monotonic()
    prompt = pack_ids(range(BLOCKS_EACH * 16))
    request = Request(which[0], prompt, SamplingParams(max_tokens=2), FRONT, cache_salt=which[0])
    offer = Offer(*which, request, b"", BLOCKS_EACH * 16, b"", "fp")
    giver.carry(giver.sender.open(offer, target, list(range(BLOCKS_EACH)), now))
    giver.sender.blocks_computed(which, BLOCKS_EACH, now)


class Load:
    """The process that sends."""

    def __init__(self, target: PeerAddress, channel: str, block_bytes: int) -> None:
        said = json.dumps(asdict(target))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                __spec__.name,
                "--send",
                said,
                "--channel",
                channel,
                "--block-bytes",
                str(block_bytes),
            ],
            stdin=subprocess.PIPE,
            text=True,
        )

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------- the worker


class Steps:
    """Runs the model and keeps how long its steps took from the loop's side: what a token waits for."""

    def __init__(self, runner: Any) -> None:
        self._steps = IsolatingSteps(runner)
        self.seconds: list[float] = []
        self._last = 0.0

    def __call__(self, batch: Batch) -> tuple[Seq[RowResult], dict[int, str]]:
        results = self._steps.run(batch)
        now = time.monotonic()
        if len(batch.rows) == ROWS and batch.num_tokens == ROWS:
            self.seconds.append(now - self._last)  # from the end of a step to the end of the next
        self._last = now
        return results


def p(percent: float, seconds: Seq[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * percent / 100))]


@contextmanager
def _load(target: PeerAddress, channel: str, block_bytes: int) -> Iterator[Load]:
    load = Load(target, channel, block_bytes)
    try:
        yield load
    finally:
        load.close()


async def measure(channel: str, rounds: int) -> float:
    """Prints each stretch; the ratio of the medians of the p99s."""
    _, runner = load_for_worker(
        model=None, dtype="auto", device="cpu", block_size=16, num_blocks=1400, kv_cache_bytes=0,
        max_num_seqs=64, max_model_len=None, threads=1,
    )  # fmt: skip
    layout: CacheLayout = runner.cache.layout
    core = BatchingCore(
        BlockPool(runner.cache.num_blocks), block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
        prefix_caching=False, fingerprint="fp",
    )  # fmt: skip
    node = DecodeWorker(
        core,
        TransferReceiver(block_bytes=layout.block_bytes),
        fingerprint="fp",
        block_bytes=layout.block_bytes,
    )
    me, coordinator, steps = Sender("decode-0", Incarnation(1)), HonestCoordinator(), Steps(runner)
    ends = receiving_ends(channel, me, node.records.counters, layout.block_bytes)
    links = Links(me, node.records.counters, block_bytes=layout.block_bytes, receiving=ends)
    address = links.bind(Endpoint("127.0.0.1", None))
    quiet: list[float] = []
    loaded: list[float] = []
    async with worker_running(coordinator, node, links, runner.cache, me, steps):
        coordinator.wants_all = True
        for row in range(ROWS):
            key = key_of(f"row-{row}", 1)
            prompt = pack_ids([(37 * row + 11 * i) % 40_000 for i in range(PROMPT_TOKENS)])
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
            coordinator.say(me, Decode(*key, Request(key[0], prompt, sampling, FRONT), b""))
        with _load(address, channel, layout.block_bytes) as load:
            await until(lambda: len(steps.seconds) > 5, 60)
            load.say("go")
            await until(lambda: node.records.counters.total("kv_transfer_bytes_total") > 0, 60)
            for _ in range(rounds):
                for word, kept in (("pause", quiet), ("go", loaded)):
                    load.say(word)
                    await asyncio.sleep(SETTLE_S)
                    steps.seconds.clear()
                    before = node.records.counters.total("kv_transfer_bytes_total")
                    await asyncio.sleep(STRETCH_S)
                    moved = node.records.counters.total("kv_transfer_bytes_total") - before
                    assert steps.seconds, "the batch has come to its end"
                    kept.append(p(99, steps.seconds))
                    print(
                        f"{channel} {'loaded' if word == 'go' else 'quiet ':<6} {len(steps.seconds):>4} steps  "
                        f"p50 {p(50, steps.seconds) * 1e3:6.1f} ms  p99 {kept[-1] * 1e3:6.1f} ms  "
                        f"{moved / STRETCH_S / 1e6:7.0f} MB/s in",
                        flush=True,
                    )
    coordinator.close()
    ratio = statistics.median(loaded) / statistics.median(quiet)
    print(f"{channel}: p99 beside a saturated link is {ratio:.2f} times that without (limit {LIMIT})")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", default="")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--unpaced", action="store_true", help="blocks are read as fast as they come")
    parser.add_argument("--send", default="")
    parser.add_argument("--block-bytes", type=int, default=0)
    given = parser.parse_args()
    if given.unpaced:
        transfer.inbox.REST_TURNS = 0
    if given.send:
        uvloop.run(saturate(PeerAddress(**json.loads(given.send)), given.channel, given.block_bytes))
        return 0
    ratios = [
        uvloop.run(measure(c, given.rounds)) for c in ([given.channel] if given.channel else ["tcp", "shm"])
    ]
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
