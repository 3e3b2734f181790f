"""What a person reads after a run: tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.load.goodput import Goodput
from bench.load.server_facts import ServerSide
from bench.load.statistics import Distribution, Interval
from bench.load.summary import MEASURES, Summary

CPU_TOO_MUCH = 0.3
"""Share of a core above which our own work may have moved the figures."""


def report(
    summary: Summary, server: ServerSide | None, head: Mapping[str, str], cpu_s: float, wall_s: float
) -> RenderableType:
    parts: list[RenderableType] = [_facts(head), "", _facts(_counts(summary)), ""]
    parts.append(_distributions(summary.distributions))
    if summary.goodput is not None:
        parts += ["", Text(goodput_line(summary.goodput))]
    if server is not None and (server.counters or server.histograms_ms):
        parts += ["", _server(server)]
    parts += ["", *_notes(summary, cpu_s, wall_s)]
    return Group(*parts)


def goodput_line(found: Goodput) -> str:
    share = found.share
    return (
        f"goodput ({found.targets} ms): {share.value:.1%} of {found.judged} requests "
        f"(95 % interval by Wilson: {share.low:.1%} to {share.high:.1%}), {found.requests_per_s:.2f} requests/s"
    )


def _facts(rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _counts(summary: Summary) -> dict[str, str]:
    counts = summary.by_outcome
    rows = {"requests": ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"}
    for fault, count in summary.faults.items():
        rows[f"  {fault}"] = f"{count} × {summary.first_words[fault]}".rstrip(" ×")
    rows["time"] = f"{summary.duration_s:.2f} s from the first request to the end of the last"
    offered = f" of {summary.offered_per_s:.3f} that came" if summary.offered_per_s else ""
    rows["requests/s"] = f"{summary.requests_per_s:.3f}{offered}"
    rows["tokens/s"] = f"{summary.output_tokens_per_s:.1f} out, {summary.input_tokens_per_s:.1f} in"
    return rows


def _distributions(found: Mapping[str, Distribution | None]) -> Table:
    table = _numbers("ms", "n", "mean", "p50", "p95", "p99", "max")
    for name, of in found.items():
        if of is not None:
            row = (
                str(of.count),
                _ms(of.mean),
                _interval(of.p50),
                _interval(of.p95),
                _interval(of.p99),
                _ms(of.max),
            )
            table.add_row(MEASURES[name][0], *row)
    return table


def _interval(of: Interval) -> str:
    return f"{_ms(of.value)} [{_ms(of.low)} {_ms(of.high)}]"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _server(server: ServerSide) -> RenderableType:
    table = _numbers("at the server, ms", "p50", "p95", "p99", "")
    for name, of in server.timelines_ms.items():
        cells = (_ms(of.p50.value), _ms(of.p95.value), _ms(of.p99.value))
        table.add_row(name, *cells, f"of {of.count} timelines")
    for name, quantiles in server.histograms_ms.items():
        if name not in server.timelines_ms:
            table.add_row(name, *(_ms(quantiles[p]) for p in ("p50", "p95", "p99")), "read off buckets")
    counted = ", ".join(f"{name} {value:.0f}" for name, value in server.counters.items())
    return Group(table, Text(f"counted meanwhile: {counted}")) if counted else table


def _notes(summary: Summary, cpu_s: float, wall_s: float) -> list[Text]:
    whole = summary.completed
    by = "the server's usage" if summary.tokens_counted_by_server else "chunks: the server gives no usage"
    notes = [
        "[ ]: 95 % intervals by bootstrap over requests. A chunk without text is nothing; "
        f"{summary.tokens_per_chunk:.2f} tokens per chunk with text, tokens by {by}.",
        f"lengths as asked: {summary.prompts_as_asked} prompts and {summary.outputs_as_asked} answers of {whole}"
        + (
            f"; {summary.cached_tokens} prompt tokens from the server's cache"
            if summary.cached_tokens
            else ""
        ),
    ]
    share = cpu_s / wall_s if wall_s > 0 else 0.0
    per_token = f", {cpu_s / summary.output_tokens * 1e6:.0f} µs per token" if summary.output_tokens else ""
    notes.append(f"this client took {share:.1%} of a core{per_token}")
    if share > CPU_TOO_MUCH:
        notes.append(
            "WARNING: that is enough to delay its own clock; take fewer requests at once or another machine"
        )
    return [Text(note) for note in notes]


def comparison(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Two saved results; the last column is the second over the first."""
    table = _numbers("", *names, "ratio")
    first, second = (result["summary"] for result in results)
    for name in ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s"):
        _compare(table, name, first[name], second[name])
    if first.get("goodput") and second.get("goodput"):
        _compare(
            table, "goodput, share", first["goodput"]["share"]["value"], second["goodput"]["share"]["value"]
        )
        _compare(
            table,
            "goodput, requests/s",
            first["goodput"]["requests_per_s"],
            second["goodput"]["requests_per_s"],
        )
    for name, (title, _) in MEASURES.items():
        one, other = first["distributions"].get(name), second["distributions"].get(name)
        for point in ("p50", "p99") if one and other else ():
            _compare(
                table,
                f"{title} {point}, ms",
                one[point]["value"],
                other[point]["value"],
                one[point],
                other[point],
            )
    return Group(table, Text("[ ]: 95 % intervals. Settings that differ:"), _differences(names, results))


def _compare(
    table: Table, name: str, one: float, other: float, of_one: Any = None, of_other: Any = None
) -> None:
    def cell(value: float, of: Any) -> str:
        return f"{_ms(value)} [{_ms(of['low'])} {_ms(of['high'])}]" if of else f"{value:.3f}"

    ratio = f"{other / one:.3f}" if one else "–"
    table.add_row(name, cell(one, of_one), cell(other, of_other), ratio)


def _differences(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Table:
    table = _numbers("", *names)
    one, other = ({**result["settings"], **result["server"]["facts"]} for result in results)
    for key in sorted({*one, *other} - {"workers"}):
        if one.get(key) != other.get(key):
            table.add_row(key, str(one.get(key)), str(other.get(key)))
    return table


def curve(points: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each run of several."""
    table = _numbers(
        "asked/s", "came/s", "served/s", "goodput share", "goodput/s", "TTFT p50", "p99", "ITL p50", "p99"
    )
    for point in points:
        summary: Summary = point["summary"]
        good, ttft, itl = summary.goodput, summary.distributions["ttft_ms"], summary.distributions["itl_ms"]
        cells = [f"{point['rate']:.3f}", f"{summary.offered_per_s:.3f}", f"{summary.requests_per_s:.3f}"]
        cells += ["–", "–"] if good is None else [_share(good.share), f"{good.requests_per_s:.3f}"]
        for of in (ttft, itl):
            cells += ["–", "–"] if of is None else [_ms(of.p50.value), _ms(of.p99.value)]
        table.add_row(*cells)
    return table


def _share(of: Interval) -> str:
    return f"{of.value:.1%} [{of.low:.1%} {of.high:.1%}]"


def _numbers(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
