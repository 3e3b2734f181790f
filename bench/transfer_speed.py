"""`python -m bench.transfer_speed`: how fast KV blocks move between two processes, checksums on, model idle.

    shm               against a copy of the same bytes by one thread
    tcp               against bare ZeroMQ: the same frames between two processes, received and dropped
    tcp, CURVE        against the same, encrypted
    zeromq, kept      beside it: bare ZeroMQ with our setting of the C library's memory (transfer/sockets.py)

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

from rich.console import Console
from rich.table import Table

from bench.load.surroundings import surroundings
from bench.transfer_ends import Pool
from transfer.cluster_key import new_key

FORMAT = "kvferry-transfer-speed-1"
COPY = "copy"
END_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    end: str = ""  # of bench.transfer_ends; "" is a copy inside this process
    curve: bool = False
    keeps_memory: bool = True
    against: str = ""
    target: float | None = None


WAYS = (
    Way(COPY),
    Way("shm", "shm", against=COPY, target=0.6),
    Way("zeromq", "zeromq", keeps_memory=False),
    Way("zeromq, kept", "zeromq", against="zeromq"),
    Way("tcp", "tcp", against="zeromq", target=0.8),
    Way("zeromq, CURVE", "zeromq", curve=True, keeps_memory=False),
    Way("tcp, CURVE", "tcp", curve=True, against="zeromq, CURVE"),
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
    """Medians over the rounds; `ratio` is of the speeds in the same round."""
    by_name = {speed.way.name: speed for speed in speeds}
    rows = []
    for speed in speeds:
        seconds, base = statistics.median(speed.seconds), by_name.get(speed.way.against)
        ratios = [] if base is None else [b / a for a, b in zip(speed.seconds, base.seconds, strict=True)]
        rows.append(
            {
                "way": speed.way.name,
                "gb_per_s": round(block_bytes / seconds / 1e9, 3),
                "us": round(seconds * 1e6, 1),
                "sender_cpu_us": round(statistics.median(speed.sender_s) * 1e6, 1),
                "receiver_cpu_us": round(statistics.median(speed.receiver_s) * 1e6, 1),
                "against": speed.way.against,
                "ratio": round(statistics.median(ratios), 3) if ratios else None,
                "target": speed.way.target,
                "rounds_us": [round(value * 1e6, 1) for value in speed.seconds],
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]], block_bytes: int) -> Table:
    table = Table(title=f"blocks of {block_bytes:,} bytes")
    for heading in (
        "way",
        "GB/s",
        "µs a block",
        "CPU µs, sender",
        "CPU µs, receiver",
        "of",
        "ratio",
        "target",
    ):
        table.add_column(heading, justify="left" if heading in ("way", "of") else "right")
    for row in rows:
        ratio, target = row["ratio"], row["target"]
        said = "" if target is None or ratio is None else f"≥ {target:g} {'yes' if ratio >= target else 'NO'}"
        table.add_row(
            row["way"], f"{row['gb_per_s']:.2f}", f"{row['us']:.1f}", f"{row['sender_cpu_us']:.1f}",
            f"{row['receiver_cpu_us']:.1f}", row["against"], "" if ratio is None else f"{ratio:.2f}", said,
        )  # fmt: skip
    return table


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and not everybody has it

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([row["way"] for row in rows], [row["gb_per_s"] for row in rows])
    axes.bar_label(
        bars,
        ["" if row["ratio"] is None else f"{row['ratio']:.2f} of {row['against']}" for row in rows],
        padding=3,
    )
    axes.set(xlabel="GB/s, medians", title="KV blocks between two processes, checksums on")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfer_speed", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--block-bytes", type=int, default=368_640, help="the default model's, in bf16")
    parser.add_argument("--blocks", type=int, default=512, help="that go over in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--ways", nargs="+", choices=[way.name for way in WAYS], metavar="WAY", help="only these"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot them here (needs matplotlib)")
    asked = parser.parse_args(argv)
    ways = [way for way in WAYS if asked.ways is None or way.name in asked.ways]
    rows = rows_of(measure(ways, asked.blocks, asked.block_bytes, asked.rounds), asked.block_bytes)
    Console().print(_table(rows, asked.block_bytes))
    if asked.json is not None:
        sizes = {"block_bytes": asked.block_bytes, "blocks": asked.blocks, "rounds": asked.rounds}
        result = {"format": FORMAT, "surroundings": surroundings(), **sizes, "rows": rows}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.png is not None:
        _plot(rows, asked.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
