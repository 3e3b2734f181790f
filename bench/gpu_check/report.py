"""What was found as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu_check.findings import Check, Findings, Speed

FORMAT = "kvferry-gpu-check-1"
NO_SPEED = "interpreter, not a speed"


def print_table(found: Findings, console: Console, where: str, *, on_gpu: bool) -> None:
    """Speeds, then what was wrong or left out, then how many checks there were."""
    table = Table(title=f"{where}{'' if on_gpu else f' ({NO_SPEED})'}")
    for name in ("what", "call"):
        table.add_column(name)
    for name in ("ms", "rate", "of the roof", "aim"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for speed in found.speeds:
        table.add_row(*_row(speed, on_gpu))
    console.print(table, highlight=False)
    for check in found.checks:
        if not check.right:
            console.print(f"WRONG: {check.part}: {check.what}: {_told(check)}", highlight=False, markup=False)
    for skipped in found.skipped:
        console.print(f"not run: {skipped.part}: {skipped.why}", highlight=False, markup=False)
    right = sum(check.right for check in found.checks)
    console.print(f"{right} of {len(found.checks)} checks right, {found.passed_s:.0f} s", highlight=False)


def _told(check: Check) -> str:
    return check.why or f"{check.found:.3g}, allowed are {check.allowed:.3g}"


def _row(speed: Speed, on_gpu: bool) -> tuple[str, ...]:
    rate = f"{speed.rate / 1e9:,.0f} GB/s" if speed.roof == "copy" else f"{speed.rate / 1e12:,.1f} TFLOP/s"
    share = "" if speed.roof_share is None else f"{speed.roof_share:.0%}"
    aim = ""
    if speed.target is not None and speed.roof_share is not None:
        met = "" if not on_gpu else " yes" if speed.roof_share >= speed.target else " NO"
        aim = f"≥ {speed.target:.0%}{met}"
    return speed.part, speed.what, f"{speed.seconds * 1e3:.3f}", rate, share, aim, speed.note


def surroundings(device: torch.device) -> dict[str, Any]:
    """Device and versions. In the interpreter nothing else of this machine matters."""
    import triton

    where: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        where |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return where


def write_json(path: Path, found: Findings, where: dict[str, Any], *, on_gpu: bool) -> None:
    result = {
        "format": FORMAT,
        "speeds_are": "medians" if on_gpu else NO_SPEED,
        "where": where,
        "seconds": round(found.passed_s, 1),
        "all_right": found.all_right,
        "checks": [{**_finite(asdict(check)), "right": check.right} for check in found.checks],
        "speeds": [asdict(speed) for speed in found.speeds],
        "noted": [asdict(noted) for noted in found.noted],
        "not_run": [asdict(skipped) for skipped in found.skipped],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
