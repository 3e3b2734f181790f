"""What came of a load, as tables and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from bench.load.statistics import Interval
from bench.promises.asked import Told, judged
from coordinator.targets import Targets

BIN_S = 2.0


def share(interval: Interval) -> str:
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def table(
    title: str, runs: Mapping[str, Sequence[Told]], targets: Mapping[str, Targets], seconds: float
) -> Table:
    found = Table("run", "tier", "asked", "refused", "failed", "first tokens in time", "gaps in time", "all in time",
                  "goodput/s", "tokens/s", title=title)  # fmt: skip
    for name, told in runs.items():
        for tier in sorted({one.asked.tier for one in told}):
            of = judged(told, tier, targets.get(tier, Targets()))
            met = sum(one.meets(targets.get(tier, Targets())) for one in told if one.asked.tier == tier)
            found.add_row(
                name, tier, str(of.asked), str(of.refused), str(of.failed), share(of.first_tokens), share(of.gaps),
                share(of.whole), f"{met / seconds:.2f}", f"{of.tokens / seconds:.1f}",
            )  # fmt: skip
    return found


def worst(told: Sequence[Told], itl_s: float) -> str:
    """The longest waits for a first token and the widest gaps, and where those over the target were."""
    first_s = [float("inf") if one.ttft_s is None else one.ttft_s for one in told]
    gaps_s = [[b - a for a, b in itertools.pairwise(one.text_s)] for one in told]
    handed_over = sum(gaps[0] > itl_s for gaps in gaps_s if gaps)
    later = sum(gap_s > itl_s for gaps in gaps_s for gap_s in gaps[1:])
    return (
        f"longest first tokens {_longest_ms(first_s)}, widest gaps {_longest_ms(itertools.chain(*gaps_s))}; over the "
        f"target were {handed_over} gaps after a first token, {later} later ones"
    )


def _longest_ms(seconds: Iterable[float]) -> str:
    return " ".join(f"{1e3 * one:.0f}" for one in sorted(seconds, reverse=True)[:4]) + " ms"


def tokens_per_s(told: Sequence[Told], from_s: float, until_s: float) -> float:
    """Answer tokens that went out in that time."""
    return sum(from_s <= at_s < until_s for one in told for at_s in one.text_s) / (until_s - from_s)


def goodput_over_time(told: Sequence[Told], targets: Mapping[str, Targets], seconds: float) -> list[float]:
    """Requests a second that met all that they were promised, by when they came."""
    bins = [0.0] * max(1, round(seconds / BIN_S))
    for one in told:
        place = int(one.asked.at_s / BIN_S)
        if place < len(bins) and one.meets(targets.get(one.asked.tier, Targets())):
            bins[place] += 1 / BIN_S
    return bins


def plot(path: Path, title: str, curves: Mapping[str, Sequence[float]], borders_s: Sequence[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed, or looked for
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.0, 4.2))
    for name, values in curves.items():
        axes.step([(n + 0.5) * BIN_S for n in range(len(values))], values, where="mid", label=name)
    for at_s in borders_s:
        axes.axvline(at_s, color="grey", linewidth=0.6, linestyle="--")
    axes.set_xlabel("seconds (dashed: the mix changes)")
    axes.set_ylabel("requests per second that met their targets")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
