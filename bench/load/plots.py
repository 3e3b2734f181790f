"""Pictures of saved results: distributions and throughput of runs, curves of sweeps.

matplotlib is imported only for a picture: `kvferry[bench]` brings it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import BadConfiguration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
MOST_BINS = 120
INCHES = (13.0, 4.2)


def plot_runs(path: Path, results: Mapping[str, Result]) -> None:
    """TTFT and ITL of each as a distribution, and output tokens over time."""
    figure, axes = _figure(3)
    for name, result in results.items():
        rows = [row for row in result["requests"] if row["outcome"] == "ok"]
        _distribution(axes[0], name, [row["ttft_ms"] for row in rows])
        _distribution(axes[1], name, [gap for row in rows for gap in row["gaps_ms"]])
        _timeline(axes[2], name, [row for row in result["requests"] if row["ttft_ms"] is not None])
    _label(axes[0], "time to first token, ms", "share of requests")
    _label(axes[1], "gap between chunks with text, ms", "share of gaps")
    _label(axes[2], "seconds", "chunks with text per second")
    for part in axes:
        part.set_xlim(left=0)
        part.set_ylim(bottom=0)
    _save(path, figure)


def plot_curves(path: Path, sweeps: Mapping[str, Result]) -> None:
    """Goodput over the rate, and what first tokens cost in gaps: TTFT p50 against ITL p99, a point for each rate."""
    figure, axes = _figure(3)
    for name, sweep in sweeps.items():
        points = sorted(sweep["points"], key=lambda point: point["rate"])
        rates = [point["rate"] for point in points]
        summaries = [point["summary"] for point in points]
        _goodput(axes[0], name, rates, summaries)
        axes[1].plot(rates, [summary["requests_per_s"] for summary in summaries], marker="o", label=name)
        shown = [(rate, of["distributions"]) for rate, of in zip(rates, summaries, strict=True)]
        shown = [(rate, of) for rate, of in shown if of["ttft_ms"] and of["itl_ms"]]
        x = [of["itl_ms"]["p99"]["value"] for _, of in shown]
        y = [of["ttft_ms"]["p50"]["value"] for _, of in shown]
        axes[2].plot(x, y, marker="o", label=name)
        for (rate, _), at in zip(shown, zip(x, y, strict=True), strict=True):
            axes[2].annotate(f"{rate:.3g}", at, textcoords="offset points", xytext=(4, 4), fontsize=7)
    _label(axes[0], "requests per second that arrive", "share that attains its targets")
    _label(axes[1], "requests per second that arrive", "requests per second served")
    _label(axes[2], "ITL p99, ms", "TTFT p50, ms (numbers: rate)")
    _save(path, figure)


def _goodput(axes: Axes, name: str, rates: Sequence[float], summaries: Sequence[Mapping[str, Any]]) -> None:
    found = [
        (rate, of["goodput"]["share"]) for rate, of in zip(rates, summaries, strict=True) if of["goodput"]
    ]
    if not found:
        return
    values = [share["value"] for _, share in found]
    below = [share["value"] - share["low"] for _, share in found]
    above = [share["high"] - share["value"] for _, share in found]
    axes.errorbar([rate for rate, _ in found], values, yerr=(below, above), marker="o", capsize=3, label=name)
    axes.set_ylim(-0.02, 1.02)


def _distribution(axes: Axes, name: str, values: Sequence[float]) -> None:
    if values:
        axes.step(np.sort(values), (np.arange(len(values)) + 1) / len(values), where="post", label=name)


def _timeline(axes: Axes, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    times_s = np.array([at / 1e3 for row in rows for at in _text_times_ms(row)])
    if not len(times_s):
        return
    seconds = float(times_s.max())
    counts, edges = np.histogram(times_s, bins=int(min(MOST_BINS, max(1, seconds))), range=(0.0, seconds))
    axes.stairs(counts / np.diff(edges), edges, label=name)


def _text_times_ms(row: Mapping[str, Any]) -> list[float]:
    return list(accumulate(row["gaps_ms"], initial=row["sent_ms"] + row["ttft_ms"]))


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed, or looked for
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=INCHES)
    return figure, list(axes)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _save(path: Path, figure: Figure) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise BadConfiguration(f"--plot {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
