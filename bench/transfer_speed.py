"""`python -m bench.transfer_speed`: how fast KV blocks move between two processes, checksums on, model idle.

    shm                    against a copy of the same bytes by one thread
    tcp                    against bare ZeroMQ: the same frames between two processes, received and dropped; as it
                           comes, and with our setting of the C library's memory (transfer/sockets.py) that tcp has
    gloo                   against tcp, which takes the same way between two machines
    tcp, CURVE             against the same two, encrypted

All take turns, round by round, so that a machine that is busy for a while is busy for each of them. What counts is the
median of the ratios of a round; a round of a pair is one alternation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.flag_types import count, new_file
from bench.load.surroundings import surroundings
from bench.pictures import why_no_picture
from bench.transfer_ends import Pool
from coordinator.admin_client import wide_console
from transfer.cluster_key import new_key

FORMAT = "kvferry-transfer-speed-2"
COPY = "copy"
END_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    end: str = ""  # of bench.transfer_ends; "" is a copy inside this process
    curve: bool = False
    keeps_memory: bool = True
    against: tuple[str, ...] = ()
    target: float | None = None  # for each of them


AS_IT_COMES, MEMORY_KEPT = "zeromq, as it comes", "zeromq, memory kept"
CURVE = ", CURVE"

WAYS = (
    Way(COPY),
    Way("shm", "shm", against=(COPY,), target=0.6),
    Way(AS_IT_COMES, "zeromq", keeps_memory=False),
    Way(MEMORY_KEPT, "zeromq"),
    Way("tcp", "tcp", against=(AS_IT_COMES, MEMORY_KEPT), target=0.8),
    Way("gloo", "gloo", against=("tcp",)),
    Way(AS_IT_COMES + CURVE, "zeromq", curve=True, keeps_memory=False),
    Way(MEMORY_KEPT + CURVE, "zeromq", curve=True),
    Way("tcp" + CURVE, "tcp", curve=True, against=(AS_IT_COMES + CURVE, MEMORY_KEPT + CURVE)),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one way, by round: seconds per block, and processor seconds per block of each end."""

    way: Way
    seconds: list[float]
    sender_s: list[float]
    receiver_s: list[float]


class Copying:
    """One core, from one pool into another."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._blocks = blocks
        self._source = Pool(blocks, block_bytes, shown=True)
        self._target = Pool(blocks, block_bytes, shown=False)

    def round(self, number: int) -> tuple[float, float, float]:
        began, used = time.perf_counter(), time.process_time()
        for block in range(self._blocks):
            self._target.host_block(block)[:] = self._source.host_block(block)
        return time.perf_counter() - began, time.process_time() - used, 0.0


class Moving:
    """Two processes."""

    def __init__(self, give: subprocess.Popen[str], take: subprocess.Popen[str]) -> None:
        self._ends = (give, take)

    def round(self, number: int) -> tuple[float, float, float]:
        before = [_ask(end, "cpu")["cpu_s"] for end in self._ends]
        seconds = _ask(self._ends[0], str(number))["seconds"]
        sender_s, receiver_s = (
            _ask(end, "cpu")["cpu_s"] - used for end, used in zip(self._ends, before, strict=True)
        )
        return seconds, sender_s, receiver_s


def _ask(end: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert end.stdin is not None
    end.stdin.write(line + "\n")
    end.stdin.flush()
    return _said(end)


def _said(end: subprocess.Popen[str]) -> dict[str, Any]:
    assert end.stdout is not None
    line = end.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(map(str, end.args))} ended with {end.wait(END_LIMIT_S)}")  # type: ignore[arg-type]
    said: dict[str, Any] = json.loads(line)
    return said


@contextmanager
def _process(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.transfer_ends", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def opened(way: Way, blocks: int, block_bytes: int, key: Path) -> Iterator[Copying | Moving]:
    if not way.end:
        yield Copying(blocks, block_bytes)
        return
    words = ["--blocks", str(blocks), "--block-bytes", str(block_bytes)]
    words += ["--keep-memory"] * way.keeps_memory + ["--key", str(key)] * way.curve
    with _process("take", way.end, *words) as take:
        target = json.dumps(_said(take)["address"])
        with _process("give", way.end, *words, "--target", target) as give:
            yield Moving(give, take)


def measure(ways: Sequence[Way], blocks: int, block_bytes: int, rounds: int) -> list[Speed]:
    """The first round opens connections and touches memory, and is left out."""
    speeds = [Speed(way, [], [], []) for way in ways]
    with ExitStack() as stack:
        key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        new_key(key)
        running = [stack.enter_context(opened(way, blocks, block_bytes, key)) for way in ways]
        for number in range(rounds + 1):
            for speed, one in zip(speeds, running, strict=True):
                found = one.round(number)
                if number:
                    for values, value in zip(
                        (speed.seconds, speed.sender_s, speed.receiver_s), found, strict=True
                    ):
                        values.append(value / blocks)
    return speeds


def rows_of(speeds: Sequence[Speed], block_bytes: int) -> list[dict[str, Any]]:
    """Medians over the rounds; `ratios` are of the speeds in the same round, by what it is compared with."""
    by_name = {speed.way.name: speed for speed in speeds}
    rows = []
    for speed in speeds:
        seconds = statistics.median(speed.seconds)
        bases = [by_name[name] for name in speed.way.against if name in by_name]
        rows.append(
            {
                "way": speed.way.name,
                "gb_per_s": round(block_bytes / seconds / 1e9, 3),
                "us": round(seconds * 1e6, 1),
                "sender_cpu_us": round(statistics.median(speed.sender_s) * 1e6, 1),
                "receiver_cpu_us": round(statistics.median(speed.receiver_s) * 1e6, 1),
                "ratios": {base.way.name: round(_ratio(speed, base), 3) for base in bases},
                "target": speed.way.target,
                "rounds_us": [round(value * 1e6, 1) for value in speed.seconds],
            }
        )
    return rows


def _ratio(speed: Speed, base: Speed) -> float:
    return statistics.median(b / a for a, b in zip(speed.seconds, base.seconds, strict=True))


def table_of(rows: Sequence[dict[str, Any]], block_bytes: int) -> Table:
    table = Table(title=f"blocks of {block_bytes:,} bytes")
    for heading in (
        "way",
        "GB/s",
        "µs a block",
        "CPU µs, sender",
        "CPU µs, receiver",
        "ratio",
        "target",
    ):
        table.add_column(heading, justify="left" if heading in ("way", "ratio") else "right", no_wrap=True)
    for row in rows:
        target, ratios = row["target"], row["ratios"]
        marks = [f"≥ {target:g} {'yes' if ratio >= target else 'NO'}" for ratio in ratios.values() if target]
        table.add_row(
            row["way"], f"{row['gb_per_s']:.2f}", f"{row['us']:.1f}", f"{row['sender_cpu_us']:.1f}",
            f"{row['receiver_cpu_us']:.1f}", _ratios_in_words(row), "\n".join(marks),
        )  # fmt: skip
    return table


def _ratios_in_words(row: dict[str, Any]) -> str:
    return "\n".join(f"{ratio:.2f} of {name}" for name, ratio in row["ratios"].items())


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and not everybody has it

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([row["way"] for row in rows], [row["gb_per_s"] for row in rows])
    axes.bar_label(bars, [_ratios_in_words(row) for row in rows], padding=3, fontsize=8)
    axes.set(xlabel="GB/s, medians", title="KV blocks between two processes, checksums on")
    axes.invert_yaxis()
    axes.margins(x=0.45)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfer_speed", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--block-bytes", type=count, default=368_640, help="the default model's, in bf16")
    parser.add_argument("--blocks", type=count, default=512, help="that go over in a round")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument(
        "--ways", nargs="+", choices=[way.name for way in WAYS], metavar="WAY", help="only these"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures here too")
    parser.add_argument("--png", type=new_file, metavar="FILE", help="plot them here (needs matplotlib)")
    asked = parser.parse_args(argv)
    if asked.png is not None and (why := why_no_picture()):
        parser.error(f"argument --png: {why}")
    ways = [way for way in WAYS if asked.ways is None or way.name in asked.ways]
    rows = rows_of(measure(ways, asked.blocks, asked.block_bytes, asked.rounds), asked.block_bytes)
    wide_console().print(table_of(rows, asked.block_bytes))
    if asked.json is not None:
        sizes = {"block_bytes": asked.block_bytes, "blocks": asked.blocks, "rounds": asked.rounds}
        result = {"format": FORMAT, "surroundings": surroundings(), **sizes, "rows": rows}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.png is not None:
        _plot(rows, asked.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
