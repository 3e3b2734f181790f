"""Kernel speeds as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from bench.kernel_case import Measured
from bench.kernel_roofs import Roofs

FORMAT = "kvferry-kernel-speed-1"
TARGETS = {
    ("decode attention, all layers", "16 × 512 tokens"): 2.0,
    ("decode step", "batch 1, context 300"): 1.8,
    ("decode step", "batch 16, context 300"): 3.0,
}
"""What the project aims at, as times over the floor."""


def table_of(found: Sequence[Measured], title: str) -> Table:
    table = Table(title=title)
    for name in ("kernel", "size"):
        table.add_column(name)
    for name in (
        "least ms",
        "GB/s",
        "GFLOP/s",
        "floor ms",
        "× floor",
        "reference, least ms",
        "× faster",
        "difference",
    ):
        table.add_column(name, justify="right")
    for one in found:
        target = TARGETS.get((one.kernel, one.size))
        table.add_row(
            one.kernel,
            one.size,
            f"{one.run_ms:.3f}",
            f"{one.gb_per_s:.1f}",
            f"{one.gflop_per_s:.1f}",
            f"{one.floor_ms:.3f}",
            f"{one.over_floor:.2f}" + ("" if target is None else f" (≤ {target})"),
            f"{one.reference_ms:.3f}",
            f"{one.speedup:.1f}",
            f"{one.difference:.1e}",
        )
    return table


def write_json(
    path: Path, found: Sequence[Measured], roofs: Roofs, settings: dict[str, object], where: dict[str, object]
) -> None:
    kernels = [{**asdict(one), "over_floor": one.over_floor, "speedup": one.speedup} for one in found]
    result = {
        "format": FORMAT,
        "settings": settings,
        "where": where,
        "roofs": asdict(roofs),
        "kernels": kernels,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def draw(path: Path, found: Sequence[Measured], title: str) -> None:
    """Each kernel's floor as a share of its time: 1 is the roof."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.24 * len(found)), layout="constrained")
    labels = [f"{one.kernel}, {one.size}" for one in found]
    places = range(len(found))
    axes.barh(places, [1 / one.over_floor for one in found], height=0.7, label="kvferry")
    axes.plot(
        [one.floor_ms / one.reference_ms for one in found], places, "k|", markersize=9, label="reference"
    )
    axes.axvline(1, color="tab:red", linewidth=1, label="roof")
    axes.set_xscale("log")
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(
        "share of what the machine could do (floor ÷ least time); what stays in a cache can pass the roof"
    )
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
