"""`python -m bench.gpu_kernels_compiled`: every Triton kernel compiled for sm_80 and sm_90, no GPU needed, as a table.

Registers by thread, spills, shared memory and matrix instructions. Says nothing of speed. Exit codes: 0, 1 a kernel did
not compile or broke one of the rules below, 2 bad flags.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Of one program, by what NVIDIA states of these chips."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_kernels_compiled", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--whole", action="store_true", help="all head sizes and dtypes (minutes)")
    parser.add_argument("--family", help="one module of kernels/gpu alone")
    parser.add_argument("--out", type=Path, help="a .json for the same figures")
    asked = parser.parse_args(arguments)
    # The interpreter is chosen at triton's import, so before what follows: kernels would be functions of Python there.
    os.environ.pop("TRITON_INTERPRET", None)
    from kernels.gpu.catalogue import missing, uncatalogued

    rows = list(_compiled(asked.whole, asked.family))
    _print(rows)
    for family in missing():
        print(f"not there: kernels/gpu/{family}.py")
    for family in uncatalogued():
        print(f"not compiled, no entry in the catalogue: kernels/gpu/{family}.py")
    if asked.out is not None:
        found = {"kernels": rows, "missing": missing(), "uncatalogued": uncatalogued()}
        asked.out.write_text(json.dumps(found, indent=1))
    return 1 if any(row["faults"] for row in rows) else 0


def _compiled(whole: bool, family: str | None) -> list[dict[str, object]]:
    from kernels.gpu.ahead_of_time import CAPABILITIES, Compiled, compile_for, launches_of
    from kernels.gpu.catalogue import Entry, entries

    def faults(entry: Entry, one: Compiled) -> list[str]:
        found = []
        if one.spill_bytes > entry.spill_bytes:
            found.append(f"{one.spill_bytes} bytes of spills")
        if one.shared_bytes > MAX_SHARED_BYTES[one.capability]:
            found.append(f"{one.shared_bytes} bytes of shared memory")
        if one.narrow_products:
            found.append(f"a block number multiplied in 32 bits: {one.narrow_products[0]}")
        if one.kernel in entry.indexes_blocks and not one.block_loads:
            found.append("no block number was found to follow")
        if entry.exact and one.fma_f64:
            found.append(f"{one.fma_f64} fused operations in float64")
        if entry.exact and one.inexact_f32:
            found.append(f"not rounded once: {', '.join(one.inexact_f32)}")
        if entry.invariant and any("wgmma" in name for name in one.mma):
            found.append("wgmma in the invariant form")
        return found

    rows: list[dict[str, object]] = []
    for entry in entries(whole):
        if family is not None and entry.family != family:
            continue
        said: dict[str, object] = {"family": entry.family, "label": entry.label}
        try:
            launches = launches_of(entry.call)
        except Exception as error:  # a row of the table, and the others are still wanted
            rows.append({**said, "kernel": "?", "faults": [f"{type(error).__name__}: {error}"]})
            continue
        for launch in launches:
            for capability in CAPABILITIES:
                try:
                    one = compile_for(launch, capability)
                except Exception as error:
                    name = launch.kernel.__name__
                    wrong = [f"{type(error).__name__}: {error}"]
                    rows.append({**said, "kernel": name, "capability": capability, "faults": wrong})
                else:
                    rows.append({**said, **asdict(one), "faults": faults(entry, one)})
    return rows


def _print(rows: list[dict[str, object]]) -> None:
    table = Table("kernel", "form", "sm", "registers", "spills", "shared", "warps", "matrix", "faults")
    for row in rows:
        mma = row.get("mma", ())
        assert isinstance(mma, tuple) and isinstance(row["faults"], list)
        numbers = (row.get(name, "") for name in ("registers", "spill_bytes", "shared_bytes", "warps"))
        table.add_row(
            str(row["kernel"]),
            str(row["label"]),
            str(row.get("capability", "")),
            *map(str, numbers),
            " ".join(mma),
            "; ".join(str(fault).strip().splitlines()[-1] for fault in row["faults"]),
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
