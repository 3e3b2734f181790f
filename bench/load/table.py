"""What a person reads after one run: tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.load.goodput import Goodput
from bench.load.records import Run
from bench.load.server_facts import ServerSide
from bench.load.statistics import Distribution, Interval
from bench.load.summary import MEASURES, Summary, summary_of_stalls

RESTARTED = "the service, or a worker of it, restarted (its counters went back): its figures are dropped"
STALL_TOO_LONG_MS = 20.0
"""As long as a decode step of a small model."""
CPU_TOO_MUCH = 0.3
"""Share of a core above which our own work may have moved the figures."""


def report(summary: Summary, server: ServerSide | None, head: Mapping[str, str], run: Run) -> RenderableType:
    parts: list[RenderableType] = [facts(head), "", facts(_counts(summary)), ""]
    parts.append(_distributions(summary.distributions))
    if summary.goodput is not None:
        parts += ["", Text(goodput_line(summary.goodput))]
    if server is not None and server.restarted:
        parts += ["", Text(RESTARTED)]
    elif server is not None and (server.counters or server.histograms_ms):
        parts += ["", _server(server)]
    parts += ["", *_notes(summary, run)]
    return Group(*parts)


def goodput_line(found: Goodput) -> str:
    share = found.share
    return (
        f"goodput ({found.targets} ms): {share.value:.1%} of {found.judged} requests "
        f"(95 % interval by Wilson: {share.low:.1%} to {share.high:.1%}), {found.requests_per_s:.2f} requests/s"
    )


def facts(rows: Mapping[str, str]) -> Table:
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
    table = numbers("ms", "n", "mean", "p50", "p95", "p99", "max")
    for name, of in found.items():
        if of is not None:
            row = (
                str(of.count),
                ms(of.mean),
                interval(of.p50),
                interval(of.p95),
                interval(of.p99),
                ms(of.max),
            )
            table.add_row(MEASURES[name][0], *row)
    return table


def interval(of: Interval) -> str:
    return f"{ms(of.value)} [{ms(of.low)} {ms(of.high)}]"


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _server(server: ServerSide) -> RenderableType:
    table = numbers("at the server, ms", "p50", "p95", "p99", "")
    for name, of in server.timelines_ms.items():
        cells = (ms(of.p50.value), ms(of.p95.value), ms(of.p99.value))
        table.add_row(name, *cells, f"of {of.count} timelines")
    for name, quantiles in server.histograms_ms.items():
        if name not in server.timelines_ms:
            table.add_row(name, *(ms(quantiles[p]) for p in ("p50", "p95", "p99")), "read off buckets")
    counted = ", ".join(f"{name} {value:.0f}" for name, value in server.counters.items())
    return Group(table, Text(f"counted meanwhile: {counted}")) if counted else table


def _notes(summary: Summary, run: Run) -> list[Text]:
    notes = [
        "[ ]: 95 % intervals by bootstrap over requests. A chunk without text is nothing; "
        f"{summary.tokens_per_chunk:.2f} tokens per chunk with text",
        _lengths_as_asked(summary),
    ]
    if summary.cached_tokens:
        notes.append(
            f"{summary.cached_tokens} of {summary.input_tokens} prompt tokens came from the server's cache"
        )
    share = run.cpu_s / run.wall_s if run.wall_s > 0 else 0.0
    per_token = (
        f", {run.cpu_s / summary.output_tokens * 1e6:.0f} µs per token" if summary.output_tokens else ""
    )
    stalls_ms = summary_of_stalls(run.stalls_s)
    late = "".join(f", {name} {value:.1f}" for name, value in stalls_ms.items())
    notes.append(
        f"this client took {share:.1%} of a core{per_token}; ms by which its own clock woke late{late}"
    )
    if share > CPU_TOO_MUCH:
        notes.append("WARNING: so much delays its own clock; take fewer requests at once or another machine")
    if stalls_ms.get("p99", 0.0) > STALL_TOO_LONG_MS:
        notes.append("WARNING: this client was kept from the processor: what came in time was seen late")
    return [Text(note) for note in notes]


def _lengths_as_asked(summary: Summary) -> str:
    if not summary.tokens_counted_by_server:
        return (
            "the server gives no usage: chunks with text are counted as tokens, prompts as long as asked for"
        )
    prompts, answers, whole = summary.prompts_as_asked, summary.outputs_as_asked, summary.completed
    return f"as long as asked, by the server's count: {prompts} prompts and {answers} answers of {whole}"


def numbers(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
