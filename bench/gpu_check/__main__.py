"""`python -m bench.gpu_check`: the command line of bench/gpu_check.sh; which parts run, in which order."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_check.findings import Finding, Findings
    from bench.gpu_check.places import Place
    from bench.gpu_check.roofs import Roofs

KERNELS = ("attention", "small", "block_moves", "sampling")
PARTS = (*KERNELS, "models", "channels", "steps")
OUT, CPU_OUT = Path("bench/results"), Path("build/bench")
NO_GPU = 3
NEEDED_BYTES = {"8B": 56 << 30}
"""Weights in two processes (15 GiB each), a pool of 64 rows of 2,048 tokens (16 GiB), and what steps take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all checks are right, 1 one is not, 2 bad flags, 3 no GPU (and no --cpu)."""
    asked = _parser().parse_args(arguments)
    if asked.cpu:
        # Chosen when Triton is imported, so before what follows.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    import torch
    from rich.console import Console

    from bench.gpu_check import report
    from bench.gpu_check.findings import Findings
    from bench.gpu_check.places import cpu_place, gpu_place

    if not asked.cpu and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --cpu runs it in Triton's interpreter", file=sys.stderr)
        return NO_GPU
    place = cpu_place() if asked.cpu else gpu_place()
    found = Findings(lambda line: print(line, flush=True), asked.limit)
    where = report.surroundings(place.device)
    title = f"{where.get('gpu', 'CPU')}, torch {where['torch']}, Triton {where['triton']}"
    found.say(title)
    _run(found, place, asked.parts or PARTS, timed=not asked.checks_only)
    if asked.tune:
        _tune(found, place, asked.tuning_file)
    report.print_table(found, Console(width=None if sys.stdout.isatty() else 200), title, on_gpu=place.on_gpu)
    folder = OUT if place.on_gpu else CPU_OUT
    out = asked.out or folder / f"gpu_check_{_slug(str(where.get('gpu', 'cpu')))}.json"
    report.write_json(out, found, where, on_gpu=place.on_gpu)
    print(f"wrote {out}")
    return 0 if found.all_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny shapes in Triton's interpreter: no speeds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--checks-only", action="store_true", help="kernels are checked and not timed")
    parser.add_argument("--tune", action="store_true", help="try launch parameters, write the tuning file")
    parser.add_argument("--tuning-file", type=Path, help="where, if not where the server looks for it")
    parser.add_argument("--out", type=Path, help=f"the .json (default in {OUT}; with --cpu in {CPU_OUT})")
    parser.add_argument(
        "--limit", type=float, default=210.0, metavar="SECONDS", help="no part begins later (default 210)"
    )
    return parser


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _run(found: Findings, place: Place, parts: Sequence[str], *, timed: bool) -> None:
    """All that may be wrong first, then what takes how long."""
    from bench.gpu_check import attention, block_moves, sampling, small
    from bench.gpu_check.roofs import measure_roofs, said

    modules = {"attention": attention, "small": small, "block_moves": block_moves, "sampling": sampling}
    families = {name: module for name, module in modules.items() if name in parts}
    for name, module in families.items():
        found.run(f"kernels: {name}", lambda m=module: m.checks(place))  # type: ignore[misc]
    if not timed and not set(parts) - set(KERNELS):
        return
    roofs: list[Roofs] = []

    def measured() -> Iterator[Finding]:
        roofs.append(measure_roofs(place))
        yield from said(roofs[0])

    found.run("roofs", measured)
    if not roofs:
        return
    for name, module in families.items() if timed else ():
        found.run(f"speed of kernels: {name}", lambda m=module: m.speeds(place, roofs[0]))  # type: ignore[misc]
    if set(parts) - set(KERNELS):
        for name in place.models:
            _model(found, place, roofs[0], name, parts, timed=name == place.models[-1])


def _model(
    found: Findings, place: Place, roofs: Roofs, name: str, parts: Sequence[str], *, timed: bool
) -> None:
    """Weights are made once for all that is run on them, and let go before the next model's."""
    from bench.gpu_check import channels, paths, steps
    from bench.gpu_check.findings import Skipped
    from kernels.device import gib

    made: list[paths.Pools] = []

    def make() -> Iterator[Finding]:
        made.append(paths.Pools(name, place))
        yield from ()

    place.tidy()
    if place.free_bytes < NEEDED_BYTES.get(name, 0):
        found.add(
            Skipped(f"{name} model", f"{gib(place.free_bytes)} are free, {gib(NEEDED_BYTES[name])} wanted")
        )
        return
    found.run(f"{name} model: random weights, pools, graphs", make)
    if not made:
        return
    parts_of_it: dict[str, Callable[[], Iterator[Finding]]] = {
        "models": lambda: paths.checks(made[0]),
        "channels": lambda: channels.checks(made[0], roofs),
        "steps": lambda: steps.speeds(name, made[0].model, place, roofs),
    }
    for part, findings in parts_of_it.items():
        if part in parts and (timed or part != "steps"):
            found.run(f"{name} model: {part}", findings)


def _tune(found: Findings, place: Place, path: Path | None) -> None:
    """Whatever time has passed: who asks for it waits for it."""
    import torch

    from bench.gpu_check import tune
    from kernels.gpu.tuning import tuning_file

    gpu = torch.cuda.get_device_name(place.device) if place.on_gpu else "interpreter"
    found.limit_s = float("inf")
    found.run("tune", lambda: tune.findings(place, path or tuning_file(gpu)))


if __name__ == "__main__":
    sys.exit(main())
