"""`python -m bench.against_peer`, as `bench/against_peer.sh` starts it: flags in, a table, JSON and PNG out.

Exit codes: 0 measured, 1 a server or a run failed (what is finished is kept; the same command goes on), 2 bad flags.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.against_peer import figures, plan, plots
from bench.against_peer.asked import DTYPES, Asked
from bench.against_peer.clients import LoadFault
from bench.against_peer.runs import Folder, OtherSettings, Places, Runner
from bench.against_peer.servers import ServerFault
from bench.flag_types import count, positive
from bench.load.surroundings import surroundings
from bench.pictures import why_no_picture

QUIET = 1.0  # load average
KEPT = "what is finished is kept: the same command goes on"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    flags = parser.parse_args(argv)
    parts = _parts(parser, flags.only)
    sizes = _sizes(flags)
    places = Places(
        flags.peers, flags.vllm_venv, flags.peer_url, flags.peer_model, flags.openvino_python, flags.gguf, flags.model,
        tuple(flags.our_flags.split()),
    )  # fmt: skip
    vllm = ("url",) if flags.peer_url else tuple(flags.budgets.split(","))
    openvino = tuple(flags.openvino_budgets.split(","))
    asked = Asked(flags.time_scale, flags.dtype)
    minutes = plan.estimate_all_s(parts, sizes, asked.curve_rates, vllm, openvino, asked.time_scale) / 60
    print(f"{', '.join(parts)}: about {minutes:.0f} minutes, results in {flags.out}", flush=True)
    if why := why_no_picture():
        print(f"no picture will be drawn, it {why}; after that the same command draws what was measured")
    if flags.estimate:
        return 0
    if (busy := os.getloadavg()[0]) > QUIET:
        print(f"this machine computes something else (load {busy:.1f}): the figures will tell of that too")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server under test ends with us
    try:
        folder = Folder.open(flags.out, _identity(sizes, places, asked))
        runner = Runner(folder, places, sizes, asked, _say)
        runner.run(parts, vllm, openvino)
    except (ServerFault, LoadFault, OtherSettings) as error:
        print(f"against_peer: {error}\n{KEPT}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nagainst_peer: ended early\n{KEPT}", file=sys.stderr)
        return 1
    return _report(folder, flags.out, asked)


def _say(line: str) -> None:
    print(line, flush=True)


def _report(folder: Folder, out: Path, asked: Asked) -> int:
    cells = folder.cells()
    rows = figures.rows(cells, asked.curve_rates)
    print(f"\n{asked.dtype}, in time: {' and '.join(asked.targets)}, time scale {asked.time_scale:g}")
    print(figures.table(rows))
    for line in figures.point_lines(cells):
        print(f"in time, {line}")
    for cell in cells:
        if why := figures.doubts(cell):
            print(f"doubtful: {cell.alternation} {cell.side} {cell.setting} {cell.load}: {why}")
    found = {
        "format": "kvferry-against-peer-1",
        "settings": folder.identity,
        "surroundings": surroundings(),
        "rows": [asdict(row) for row in rows],
        "cells": [asdict(cell) for cell in cells],
    }
    (out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    drawn = [] if why_no_picture() else plots.draw(cells, asked, out)
    print("\n" + ", ".join(map(str, [out / "figures.json", *drawn])))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/against_peer.sh",
        description="kvferry and other servers on this machine, in turn, under the same load.",
    )
    parser.add_argument("--peers", type=Path, help="folder with serve_vllm_cpu.sh and load.sh")
    parser.add_argument("--vllm-venv", type=Path, help="where vLLM is installed")
    parser.add_argument(
        "--peer-url", help="a server that runs already, in place of vLLM; it must be idle while we run"
    )
    parser.add_argument("--peer-model", default="peer", help="what the server at --peer-url calls its model")
    parser.add_argument("--openvino-python", type=Path, help="Python of the venv with openvino-genai")
    parser.add_argument("--gguf", type=Path, help="the model as 16-bit GGUF, for OpenVINO")
    parser.add_argument("--model", type=Path, required=True, help="model folder, for both sides")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of results; finished runs in it are kept"
    )
    parser.add_argument("--only", default=",".join(plan.PARTS), help="some of: %(default)s")
    parser.add_argument(
        "--budgets", default=",".join(plan.VLLM_BUDGETS), help="vLLM's --max-num-batched-tokens"
    )
    parser.add_argument("--openvino-budgets", default=",".join(plan.OPENVINO_BUDGETS), help="likewise")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0],
        help="of both sides; without bf16 instructions (AVX2) vLLM is four times faster in float32",
    )  # fmt: skip
    parser.add_argument(
        "--time-scale", type=positive, default=1.0,
        help="on a machine so many times slower than one on which vLLM does 4.5 requests/s: rates are divided by it, "
        "targets multiplied, for both sides",
    )  # fmt: skip
    parser.add_argument("--our-flags", default="", help="more flags of kvferry serve; none: its defaults")
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests, and later alternations of winners only"
    )
    parser.add_argument("--alternations", type=count, help="default 3")
    parser.add_argument("--saturated-requests", type=count, help="of a saturated run")
    parser.add_argument("--curve-requests", type=count, help="of a point of the trade-off curve")
    parser.add_argument(
        "--goodput-requests",
        type=count,
        help="of a goodput point, in one alternation; all together should be 300 or more",
    )
    parser.add_argument("--estimate", action="store_true", help="only says how long it will take")
    return parser


def _parts(parser: argparse.ArgumentParser, only: str) -> tuple[plan.Part, ...]:
    wanted = only.split(",")
    unknown = [name for name in wanted if name not in plan.PARTS]
    if unknown:
        parser.error(f"--only {only}: {', '.join(unknown)} is none of {', '.join(plan.PARTS)}")
    return tuple(part for part in plan.PARTS if part in wanted)


def _sizes(flags: argparse.Namespace) -> plan.Sizes:
    sizes = plan.QUICK if flags.quick else plan.Sizes()
    given = {
        "alternations": flags.alternations,
        "saturated": flags.saturated_requests,
        "curve": flags.curve_requests,
        "goodput": flags.goodput_requests,
    }
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


def _identity(sizes: plan.Sizes, places: Places, asked: Asked) -> dict[str, object]:
    """What must be the same for runs to be of one result; more alternations, parts or settings may come later."""
    code = (":/common", ":/kernels", ":/transfer", ":/prefill_node", ":/decode_node", ":/coordinator")
    git = ["git", "-C", str(Path(__file__).parent), "log", "-1", "--format=%h", "--", *code]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "requests": {"saturated": sizes.saturated, "curve": sizes.curve, "goodput": sizes.goodput},
        "revision": revision,
        "asked": asdict(asked),
        "our_flags": list(places.our_flags),
        "peer_url": places.peer_url,
        "model": str(places.model),
    }


if __name__ == "__main__":
    sys.exit(main())
