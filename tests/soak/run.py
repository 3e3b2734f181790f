"""`make soak`: a whole service under mixed load, aborts and kills, and what came of it.

    python -m tests.soak.run [seconds] [--plot soak.png]

Every KILL_EVERY_S a random worker, now and then the coordinator, is killed; in the second half some are spared, so that
there are lives long enough to judge. Passes when ten fixed greedy prompts had
the same answers throughout, nothing failed but what a dead coordinator had, nobody waits in the end, no long life of a
process (a minute and a half; there must be one) grew by more than the limits below, and everything is idle. With
matplotlib installed it also draws the samples.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import httpx
from tokenizers import Tokenizer

from kernels.default_model import ensure_default_model, terminal_progress
from tests.e2e.conftest import LICENSE
from tests.e2e.service import Service, serving
from tests.fuzz.counting import anonymous_bytes, descriptors
from tests.soak.growth import Life, Slope
from tests.soak.load import CLIENTS, Load

KILL_EVERY_S = 20.0
COORDINATOR_EVERY = 6  # kills
AWAY_S = 15.0  # what a killed coordinator may cost
SPARED = ("prefill-0", "decode-0")  # in the second half, and the coordinator: a slope needs a life of minutes
SAMPLE_S = 1.0
LAST_ANSWERS_S = 60.0
MAX_BYTES_PER_HOUR = 64 << 20  # a slope that is surely above this fails
MAX_DESCRIPTORS_PER_HOUR = 60.0
MAX_THREADS_PER_HOUR = 20.0


class Soak:
    def __init__(self, service: Service, load: Load, seconds: float) -> None:
        self._service = service
        self._load = load
        self._ends = time.monotonic() + seconds
        self._spares_from = time.monotonic() + seconds / 2
        self._random = Random(4)
        self._excused_until = 0.0
        self.kills = 0
        self.lives: dict[int, Life] = {}

    async def run(self) -> None:
        load = self._load
        await load.learn()
        asking = [load.ask_fixed(), *(load.ask_anything() for _ in range(CLIENTS))]
        clients = [asyncio.create_task(one) for one in asking]
        next_kill = time.monotonic() + KILL_EVERY_S
        while (now := time.monotonic()) < self._ends:
            load.excused = now < self._excused_until
            await asyncio.to_thread(self._sample)
            if now >= next_kill and now + AWAY_S < self._ends:
                next_kill = now + KILL_EVERY_S
                await asyncio.to_thread(self._kill)
            self._say_progress()
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(SAMPLE_S)
        load.over = True
        done, hanging = await asyncio.wait(clients, timeout=LAST_ANSWERS_S)
        if hanging:
            load.errors.append(f"{len(hanging)} clients have no answer {LAST_ANSWERS_S:g} s after the end")
        for client in hanging:
            client.cancel()
        for client in done:
            client.result()

    def _workers(self) -> dict[int, str]:
        try:
            return {row["pid"]: row["id"] for row in self._service.workers() if row["state"] != "lost"}
        except (httpx.HTTPError, AssertionError):
            return {}

    def _sample(self) -> None:
        """Every process of the service, by what the system says of it."""
        names = self._workers()
        for pid in self._service.descendants():
            with suppress(OSError):
                name = names.get(pid) or _command(pid)
                life = self.lives.setdefault(pid, Life(name, pid))
                memory, files, threads = (
                    anonymous_bytes(pid),
                    descriptors(pid),
                    len(os.listdir(f"/proc/{pid}/task")),
                )
                life.at_s.append(time.monotonic())
                life.anonymous_bytes.append(float(memory))
                life.descriptors.append(float(files))
                life.threads.append(float(threads))

    def _kill(self) -> None:
        self.kills += 1
        workers = self._workers()
        spares = time.monotonic() > self._spares_from
        if self.kills % COORDINATOR_EVERY == 0 and not spares:
            victims = [pid for pid in self._service.descendants() if "coordinator" in _command(pid)]
            self._load.excused = True
            self._excused_until = time.monotonic() + AWAY_S
        else:
            victims = [pid for pid, name in workers.items() if not spares or name not in SPARED]
        if victims:
            os.kill(self._random.choice(victims), signal.SIGKILL)

    def _say_progress(self) -> None:
        left = max(0.0, self._ends - time.monotonic())
        counted = "  ".join(f"{kind} {count}" for kind, count in sorted(self._load.counted.items()))
        print(f"\r{left:5.0f} s left  {self.kills} kills  {counted}   ", end="", flush=True)


def _command(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    modules = [
        word.decode() for word in words if word in (b"prefill_node", b"decode_node") or b"coordinator" in word
    ]
    return modules[0] if modules else "another"


def verdict(soak: Soak, load: Load) -> list[str]:
    """Prints what grew; what is wrong."""
    faults = [*load.wrong[:5], *load.errors[:5]]
    print(f"\n{'process':<16} {'life':>7}  {'anonymous, MB/h':>22}  {'descriptors/h':>18}  {'threads/h':>14}")
    long_lives = [life for life in soak.lives.values() if life.is_long]
    if not long_lives:
        faults.append("no process lived long enough to show what grows: give it more time")
    if not load.counted["fixed"]:
        faults.append("no fixed prompt was answered")
    for life in long_lives:
        memory, files, threads = map(life.slope, (life.anonymous_bytes, life.descriptors, life.threads))
        seconds = life.at_s[-1] - life.at_s[0]
        columns = (_shown(memory, 2**20), _shown(files), _shown(threads))
        print(f"{life.name:<16} {seconds:>5.0f} s  {columns[0]:>22}  {columns[1]:>18}  {columns[2]:>14}")
        for what, slope, limit in (
            ("anonymous bytes", memory, MAX_BYTES_PER_HOUR),
            ("descriptors", files, MAX_DESCRIPTORS_PER_HOUR),
            ("threads", threads, MAX_THREADS_PER_HOUR),
        ):
            if slope.least > limit:
                faults.append(
                    f"{life.name} ({life.pid}) gains {slope.per_hour:,.0f} {what} per hour, over {limit:,}"
                )
    return faults


def _shown(slope: Slope, unit: int = 1) -> str:
    return f"{slope.per_hour / unit:+.1f} ± {slope.plus_minus / unit:.1f}"


def plot(lives: list[Life], to: Path) -> None:
    """One line for each process. Needs matplotlib."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    began = min(life.at_s[0] for life in lives)
    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(10, 7))
    kinds: list[tuple[str, Callable[[Life], list[float]]]] = [
        ("anonymous memory, MB", lambda life: [value / 2**20 for value in life.anonymous_bytes]),
        ("file descriptors", lambda life: life.descriptors),
    ]
    for axis, (label, values) in zip(axes, kinds, strict=True):
        for life in lives:
            axis.plot([at - began for at in life.at_s], values(life), label=f"{life.name} {life.pid}")
        axis.set_ylabel(label)
    axes[-1].set_xlabel("seconds")
    figure.savefig(to)
    print(f"drawn in {to}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="?", default=600.0)
    parser.add_argument("--plot", type=Path, default=Path("soak.png"))
    given = parser.parse_args()
    with terminal_progress() as progress:
        tokenizer = Tokenizer.from_file(str(ensure_default_model(progress) / "tokenizer.json"))
    ids = tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--prefill", "2", "--decode", "2", "--kv-cache-memory", "256MiB")
        with serving(Path(folder) / "log", *flags) as service:
            load = Load(service.url, list(ids), Random(3))
            soak = Soak(service, load, given.seconds)
            asyncio.run(soak.run())
            faults = verdict(soak, load)
            plot(list(soak.lives.values()), given.plot)
            service.until_idle(60)
    print(
        "\n".join(faults)
        or f"constant, flat and idle: {sum(load.counted.values())} requests, {soak.kills} kills"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
