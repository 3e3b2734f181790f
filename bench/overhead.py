"""`python -m bench.overhead`: what everything that is no arithmetic costs, and how it grows.

    decode worker    per step           with 16 … 1,000 sequences running
    prefill worker   per step           with prompts in line behind it
    transfer         per block          deciding about it, its bytes not moved
    coordinator      per request        with 100 … 100,000 waiting
    front            per token          with 1 … 256 answers streamed by a real coordinator process

All figures are processor time, the least of several rounds: neighbours make them larger, never smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.flag_types import count, count_or_none, new_file
from bench.load.surroundings import surroundings
from bench.overhead_coordinator import RequestCost, request_cost
from bench.overhead_front import FrontCost, front_costs
from bench.overhead_transfer import BlockCost, block_cost
from bench.overhead_workers import DecodeCost, PrefillCost, decode_cost, prefill_cost
from bench.pictures import why_no_picture
from common.errors import StartupError
from coordinator.model_folder import resolve_model

FORMAT = "kvferry-overhead-1"
Cost = DecodeCost | PrefillCost | BlockCost | RequestCost | FrontCost

TARGETS_US = {
    ("decode worker, per step", 256, "scheduler_us"): 200.0,
    ("coordinator, per request", 100, "dispatch_us"): 300.0,
    ("front, per token", 64, "token_us"): 40.0,
}
"""What the project aims at."""


@dataclass(frozen=True, slots=True)
class Sizes:
    running: Sequence[int] = (16, 64, 256, 1000)
    in_line: Sequence[int] = (1, 16, 200)
    transfers: Sequence[int] = (0, 100)
    waiting: Sequence[int] = (100, 1000, 10_000, 100_000)
    streams: Sequence[int] = (1, 16, 64, 256)


def measure(sizes: Sizes, model: Path | None) -> Iterator[tuple[str, Cost]]:
    """Each figure with what it is of. Without a model the front is left out: it needs a tokenizer."""
    yield from (("decode worker, per step", decode_cost(running)) for running in sizes.running)
    yield from (("prefill worker, per step", prefill_cost(waiting)) for waiting in sizes.in_line)
    yield from (("transfer, per block", block_cost(others)) for others in sizes.transfers)
    yield from (("coordinator, per request", request_cost(waiting)) for waiting in sizes.waiting)
    if model is not None:
        yield from (("front, per token", cost) for cost in front_costs(model, sizes.streams))


def row_of(what: str, cost: Cost) -> dict[str, Any]:
    return {"what": what, **{name: round(value, 2) for name, value in asdict(cost).items()}}


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="processor time, µs")
    for heading in ("what", "size", "figure", "µs", "target"):
        table.add_column(heading, justify="right" if heading in ("µs", "target") else "left")
    for row in rows:
        (size, number), *figures = list(row.items())[1:]
        for name, value in figures:
            target = TARGETS_US.get((row["what"], number, name))
            said = "" if target is None else f"≤ {target:g} {'yes' if value <= target else 'NO'}"
            figure = name.removesuffix("_us").replace("_", " ")
            table.add_row(row["what"], f"{number} {size}", figure, f"{value:,.1f}", said)
    return table


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and not everybody has it

    kinds = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(4 * len(kinds), 3.5), layout="constrained")
    for place, kind in enumerate(kinds, 1):
        axes = figure.add_subplot(1, len(kinds), place)
        of_kind = [row for row in rows if row["what"] == kind]
        _, size, *names = of_kind[0]
        for name in names:
            label = name.removesuffix("_us").replace("_", " ")
            axes.plot([row[size] for row in of_kind], [row[name] for row in of_kind], "o-", label=label)
        axes.set(title=kind, xlabel=size, ylabel="processor time, µs", xscale="symlog")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", help="folder or hub id whose tokenizer the front uses (default: the default model)"
    )
    parser.add_argument("--without-front", action="store_true", help="start no coordinator process")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures here too")
    parser.add_argument("--png", type=new_file, metavar="FILE", help="plot them here (needs matplotlib)")
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        of = count_or_none if 0 in field.default else count  # type: ignore[operator]
        parser.add_argument(flag, type=of, nargs="+", default=field.default, metavar="N")
    asked = parser.parse_args(argv)
    if asked.png is not None and (why := why_no_picture()):
        parser.error(f"argument --png: {why}")
    sizes = Sizes(**{field.name: getattr(asked, field.name) for field in fields(Sizes)})
    try:
        model = None if asked.without_front else Path(resolve_model(asked.model))
    except StartupError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    rows = []
    for what, cost in measure(sizes, model):
        rows.append(row_of(what, cost))
        print(rows[-1], file=sys.stderr, flush=True)
    Console().print(_table(rows))
    if asked.json is not None:
        result = {"format": FORMAT, "surroundings": surroundings(), "rows": rows}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.png is not None:
        _plot(rows, asked.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
