"""How fast blocks move over each channel, beside a bare copy of the same bytes. By hand, on a quiet machine:

    python -m tests.transfer.channel_speed [--block-bytes 368640] [--blocks 512] [--rounds 5]

Two processes and the real protocol; from a transfer's offer to its delivery. The bare copy is one core's, from one
pool into another, with and without the checksum that every channel takes twice.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import uvloop
import xxhash

from tests.transfer.bare_pool import CHANNELS, BarePool
from tests.transfer.channel_ends import KEY_FILE, Giver, address_of, until
from tests.transfer.pair import key
from tests.transfer.test_channels import another
from transfer.cluster_key import new_key
from transfer.sockets import keep_freed_memory

WITH_CURVE = "tcp over CURVE"
AT_ONCE = 64  # blocks of one transfer


def bare_copy(blocks: int, block_bytes: int, *, checked: bool) -> float:
    """Seconds to copy every block once."""
    source, target = BarePool(blocks, block_bytes), BarePool(blocks, block_bytes)
    source.fill()
    target.fill()
    started = time.perf_counter()
    for block in range(blocks):
        target.host_block(block)[:] = source.host_block(block)
        if checked:
            xxhash.xxh3_64_intdigest(target.host_block(block))
    seconds = time.perf_counter() - started
    source.close()
    target.close()
    return seconds


def cpu_s(pid: int) -> float:
    """What a process has used so far, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def moved(
    channel: str, blocks: int, block_bytes: int, rounds: int
) -> tuple[list[float], dict[str, float]]:
    """Seconds per round, in which every block goes over once, and CPU seconds of both ends in all of them. The first
    round touches the memory and is left out."""
    pool = BarePool(blocks, block_bytes)
    pool.fill()
    giver = Giver(pool, channel)
    giver.start()
    seconds: list[float] = []
    used: dict[str, float] = {}
    with another("take", "decode-0", 1, channel, blocks * (rounds + 1), block_bytes) as other:
        target = address_of((await other.say())["address"])
        pids = {"sender": os.getpid(), "receiver": other.process.pid}
        for number in range(rounds + 1):
            if number == 1:
                used = {end: cpu_s(pid) for end, pid in pids.items()}
            started, done = time.perf_counter(), len(giver.sent)
            for first in range(0, blocks, AT_ONCE):
                some = list(range(first, min(first + AT_ONCE, blocks)))
                giver.give(key(f"{number}-{first}"), some, target)
            wanted = done + -(-blocks // AT_ONCE)
            await until(lambda w=wanted: len(giver.sent) >= w or giver.failed, 60.0)  # type: ignore[misc]
            assert not giver.failed
            seconds.append(time.perf_counter() - started)
        used = {end: cpu_s(pid) - used[end] for end, pid in pids.items()}
    await giver.close()
    return seconds[1:], used


def say(name: str, seconds: float, blocks: int, block_bytes: int) -> None:
    print(
        f"{name:>16}  {blocks * block_bytes / seconds / 1e9:6.2f} GB/s  {seconds / blocks * 1e6:7.1f} µs per block"
    )


def key_file() -> str:
    path = Path(tempfile.mkdtemp()) / "key"
    new_key(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    keep_freed_memory()
    for checked in (False, True):
        best = min(bare_copy(asked.blocks, asked.block_bytes, checked=checked) for _ in range(3))
        say("copy and hash" if checked else "bare copy", best, asked.blocks, asked.block_bytes)
    for name in (*CHANNELS, WITH_CURVE):
        channel = "tcp" if name == WITH_CURVE else name
        if name == WITH_CURVE:
            os.environ[KEY_FILE] = key_file()
        rounds, used = uvloop.run(moved(channel, asked.blocks, asked.block_bytes, asked.rounds))
        say(name, min(rounds), asked.blocks, asked.block_bytes)
        say("median", sorted(rounds)[len(rounds) // 2], asked.blocks, asked.block_bytes)
        per_block = {end: seconds / (len(rounds) * asked.blocks) * 1e6 for end, seconds in used.items()}
        print(f"{'CPU':>16}  " + ", ".join(f"{end} {us:.0f} µs per block" for end, us in per_block.items()))


if __name__ == "__main__":
    main()
