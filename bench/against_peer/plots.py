"""Two pictures: the trade-off of TTFT against ITL at each rate, and the share of requests in time over the rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.against_peer.asked import Asked
from bench.against_peer.figures import Cell, load_name, pooled_goodput, values
from bench.against_peer.plan import VLLM_BUDGETS
from bench.against_peer.search import WANTED
from bench.load.statistics import wilson

OURS, THEIRS = "#d6336c", "#1c7ed6"


def draw(cells: Sequence[Cell], asked: Asked, folder: Path) -> list[Path]:
    """Files drawn, for the parts that were measured."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    measured = [
        rate for rate in asked.curve_rates if any(cell.load == load_name("curve", rate) for cell in cells)
    ]
    if measured:
        drawn.append(_trade_off(cells, measured, folder / "trade_off.png"))
    if any(cell.load.startswith("goodput@") for cell in cells):
        drawn.append(_goodput(cells, asked.in_time, folder / "goodput.png"))
    return drawn


def _trade_off(cells: Sequence[Cell], rates: Sequence[float], path: Path) -> Path:
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(rates), figsize=(5.5 * len(rates), 4.5), squeeze=False)
    for axes, rate in zip(all_axes[0], rates, strict=True):
        load = load_name("curve", rate)
        theirs = _medians(cells, "vllm", load)
        known = [setting for setting in VLLM_BUDGETS if setting in theirs]
        order = known + sorted(set(theirs) - set(known))
        _line(axes, [(name, *theirs[name]) for name in order], THEIRS, "peer, by token budget")
        _line(axes, [(n, *at) for n, at in _medians(cells, "kvferry", load).items()], OURS, "kvferry")
        axes.set(title=f"{rate:g} requests/s", xlabel="TTFT p50, ms", ylabel="ITL p99, ms")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
    return _save(figure, path)


def _medians(cells: Sequence[Cell], side: str, load: str) -> dict[str, tuple[float, float]]:
    """Setting → TTFT p50, ITL p99."""
    ttft = values(cells, side, load, "ttft_p50_ms")  # type: ignore[arg-type]
    itl = values(cells, side, load, "itl_p99_ms")  # type: ignore[arg-type]
    return {name: (median(ttft[name].values()), median(itl[name].values())) for name in ttft}


def _line(axes: Any, points: Sequence[tuple[str, float, float]], color: str, label: str) -> None:
    axes.plot([x for _, x, _ in points], [y for _, _, y in points], "o-", color=color, label=label)
    for name, x, y in points:
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)


def _goodput(cells: Sequence[Cell], in_time: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (side, setting), points in pooled_goodput(cells).items():
        bounds = [wilson(point.attained, point.judged) for point in points.values()]
        shares = [bound.value for bound in bounds]
        # At a share of 1 the upper bound is 1 but for rounding.
        spread = [[max(0.0, b.value - b.low) for b in bounds], [max(0.0, b.high - b.value) for b in bounds]]
        style = "-" if side == "kvferry" else "--"
        pools = (side, setting) == ("kvferry", "pools")
        name, color = (side, OURS) if pools else (f"{side} {setting}", None)
        axes.errorbar(list(points), shares, yerr=spread, fmt=f"o{style}", color=color, capsize=3, label=name)
    axes.axhline(WANTED, color="gray", linewidth=0.8)
    axes.set(xlabel="requests/s offered", ylabel=f"share with {in_time}", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
