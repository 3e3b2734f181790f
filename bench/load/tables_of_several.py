"""What a person reads of several runs: a curve over rates, and saved results beside each other. Pure.

All of it from the plain values that a saved result holds, so that a curve looks the same today and from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.load.rate_search import RateSearch
from bench.load.summary import MEASURES
from bench.load.table import RESTARTED, facts, ms, numbers

Result = Mapping[str, Any]
Cell = Callable[[Any], str]
UNINTERESTING = {"save_result", "plot", "progress", "compare"}


# ------------------------------------------------------------ a curve


def curve(points: Sequence[Result]) -> Table:
    """A line for each run."""
    titles = (
        "came/s",
        "served/s",
        "goodput share",
        "goodput/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "errors",
    )
    table = numbers("asked/s", *titles)
    for point in points:
        summary = point["summary"]
        good = summary["goodput"]
        cells = [f"{summary['offered_per_s']:.3f}", f"{summary['requests_per_s']:.3f}"]
        cells += ["–", "–"] if good is None else [share(good["share"]), f"{good['requests_per_s']:.3f}"]
        for name in ("ttft_ms", "itl_ms"):
            of = summary["distributions"][name]
            cells += ["–", "–"] if of is None else [ms(of["p50"]["value"]), ms(of["p99"]["value"])]
        errors = summary["by_outcome"]["failed"] + summary["by_outcome"]["rejected"]
        table.add_row(f"{float(point['rate']):.3f}", *cells, str(errors))
    return table


def curve_report(head: Mapping[str, str], points: Sequence[Result]) -> RenderableType:
    cpu_s = sum(point["client"]["cpu_s"] for point in points)
    wall_s = sum(point["client"]["wall_s"] for point in points)
    client = f"this client took {cpu_s / wall_s if wall_s else 0.0:.1%} of a core"
    notes = [f"[ ]: 95 % intervals by Wilson; {client}"]
    notes += [
        f"at {float(point['rate']):.3f}/s {RESTARTED}"
        for point in points
        if (point["server"] or {}).get("restarted")
    ]
    return Group(facts(head), "", curve(points), "", *map(Text, notes))


def rate_line(wanted: float, targets: str, search: RateSearch) -> str:
    said = _rate_found(wanted, targets, search)
    if search.too_few is None:
        return said
    return (
        f"{said}; too few requests for {search.too_few:.3g}/s: all came long before they were served. Raise "
        "--num-prompts (or --duration)"
    )


def _rate_found(wanted: float, targets: str, search: RateSearch) -> str:
    found = search.found()
    if found is None and search.too_few is not None:
        return f"no rate is known at which {wanted:.0%} attain {targets} ms"
    if found is None:
        return f"no rate down to {search.failing or search.first_rate:.3g}/s at which {wanted:.0%} attain {targets} ms"
    if search.failing is None:
        return f"{wanted:.0%} attain {targets} ms at every rate tried, up to {found:.3f}/s"
    return (
        f"{wanted:.0%} attain {targets} ms up to {found:.3f} requests/s, by the line between "
        f"{search.passing:.3f} ({search.shares[search.passing or 0.0]:.1%}) and "
        f"{search.failing:.3f} ({search.shares[search.failing]:.1%})"
    )


def failures_line(summaries: Sequence[Result]) -> str:
    """ "" where none failed."""
    counts = [summary["by_outcome"] for summary in summaries]
    failed, rejected = (sum(of[name] for of in counts) for name in ("failed", "rejected"))
    if not failed + rejected:
        return ""
    return f"of {sum(sum(of.values()) for of in counts)} requests {failed} failed and {rejected} were refused"


# ------------------------------------------------------------ side by side


def comparison(results: Mapping[str, Result]) -> RenderableType:
    """Saved runs; each after the first also over the first."""
    first, *others = results
    table = numbers("", *results, *(f"{name}/{first}" for name in others))
    for title, values, cell in _rows([result["summary"] for result in results.values()]):
        bases = [value["value"] if isinstance(value, Mapping) else value for value in values]
        ratios = [f"{base / bases[0]:.3f}" if bases[0] else "–" for base in bases[1:]]
        table.add_row(title, *map(cell, values), *ratios)
    return Group(table, Text("[ ]: 95 % intervals. Settings that differ:"), _differences(results))


def _rows(summaries: Sequence[Result]) -> Iterator[tuple[str, list[Any], Cell]]:
    def plain(value: float) -> str:
        return f"{value:.3f}"

    def with_bounds(of: Mapping[str, float]) -> str:
        return f"{ms(of['value'])} [{ms(of['low'])} {ms(of['high'])}]"

    for name in ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s"):
        yield name.replace("_per_s", "/s").replace("_", " "), [of[name] for of in summaries], plain
    if all(of["goodput"] for of in summaries):
        yield "goodput, share", [of["goodput"]["share"] for of in summaries], share
        yield "goodput, requests/s", [of["goodput"]["requests_per_s"] for of in summaries], plain
    for name, (title, _) in MEASURES.items():
        found = [of["distributions"].get(name) for of in summaries]
        for point in ("p50", "p99") if all(found) else ():
            yield f"{title} {point}, ms", [of[point] for of in found if of], with_bounds


def _differences(results: Mapping[str, Result]) -> Table:
    table = numbers("", *results)
    settings = [{**result["settings"], **result["service"]} for result in results.values()]
    for key in sorted({key for of in settings for key in of} - UNINTERESTING):
        values = [of.get(key) for of in settings]
        if any(value != values[0] for value in values):
            table.add_row(key, *map(str, values))
    return table


def share(of: Mapping[str, float]) -> str:
    return f"{of['value']:.1%} [{of['low']:.1%} {of['high']:.1%}]"
