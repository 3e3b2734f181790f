"""Tries launch parameters of attention, and writes the best where the server finds them (kernels/gpu/tuning.py).

One field after the other, from the table's values on: the product of all of them would take minutes to compile. What
counts is the mean of a decode batch's and a chunk's time over what they take with the table's values; a launch that is
not as right as it is fast is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.gpu_check import attention
from bench.gpu_check.findings import Finding, Noted
from bench.gpu_check.places import BLOCK_SIZE, Place
from kernels.gpu.tuning import Launch, read_tuning

FIELDS: dict[str, tuple[int, ...]] = {
    "keys": (32, 64, 128),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4),
    "split": (256, 512, 1024),
}
CPU_FIELDS: dict[str, tuple[int, ...]] = {"keys": (16, 32)}
GAIN_WANTED = 0.02
"""Less is noise, and every change of the file changes bits."""


@dataclass(frozen=True, slots=True)
class Tried:
    launch: Launch
    over_table: float
    """Its time over that of the table's values; infinite where it cannot be launched."""
    why: str = ""


def findings(place: Place, path: Path) -> Iterator[Finding]:
    """Writes `path` where something is better than the table's values."""
    table = place.launch(place.shape.head_dim)
    best, tried = search(table, FIELDS if place.on_gpu else CPU_FIELDS, _measure(place, table))
    for one in tried:
        what = ", ".join(f"{name} {value}" for name, value in asdict(one.launch).items())
        yield Noted("tune", f"{what}: {one.why or f'{one.over_table:.3f} of the time'}")
    if best.launch == table:
        yield Noted("tune", "nothing is better than the table's values: no file is written")
        return
    found = list(attention.checks(place, best.launch))
    yield from found
    if all(check.right for check in found):
        write_tuning(path, best.launch, table)
        yield Noted("tune", f"wrote {path}: {best.over_table:.3f} of the time with the table's values")


def search(
    table: Launch, fields: dict[str, tuple[int, ...]], measure: Callable[[Launch], Tried]
) -> tuple[Tried, list[Tried]]:
    """The best, and all that were tried, in order. One that is not clearly better than the best so far is not it."""
    best = Tried(table, 1.0)
    tried: list[Tried] = []
    for name, values in fields.items():
        for value in values:
            if getattr(best.launch, name) == value:
                continue
            try:
                launch = replace(best.launch, **{name: value})
            except ValueError:  # no such launch, whatever the GPU
                continue
            one = measure(launch)
            tried.append(one)
            if one.over_table < best.over_table - GAIN_WANTED:
                best = one
    return best, tried


def _measure(place: Place, table: Launch) -> Callable[[Launch], Tried]:
    cases = [
        attention.Timed(place, place.shape, rows, BLOCK_SIZE) for rows in (place.decode[-1], place.chunks[0])
    ]
    before = [case.seconds(place, table) for case in cases]

    def measure(launch: Launch) -> Tried:
        try:
            taken = [case.seconds(place, launch) for case in cases]
        except (
            Exception
        ) as error:  # Triton's kinds: no room in shared memory or registers, or it does not compile
            if place.on_gpu:
                torch.cuda.synchronize()
            return Tried(launch, math.inf, type(error).__name__)
        ratios = [ours / theirs for ours, theirs in zip(taken, before, strict=True)]
        return Tried(launch, math.prod(ratios) ** (1 / len(ratios)))

    return measure


def write_tuning(path: Path, launch: Launch, table: Launch) -> None:
    """What differs from the table. Whole or not at all, and readable by `read_tuning`."""
    changed = {name: value for name, value in asdict(launch).items() if value != getattr(table, name)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps({"attention": changed}, indent=1) + "\n")
    read_tuning(scratch)
    scratch.replace(path)
