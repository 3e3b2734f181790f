"""From measured cells to the rows of the issue's table: medians over alternations, the peer's best, ratios. Pure.

Best for each figure on its own: the peer may use one setting for throughput and another for ITL, we have one.
Goodput is no median: a crossing of single alternations rests on too few requests, so their points are pooled first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from bench.against_peer.plan import Session, Side
from bench.against_peer.search import (
    ENOUGH,
    Point,
    Points,
    crossing,
    pooled,
    requests_behind,
    thick_ones,
)

Better = Literal["more", "less"]
AT_LEAST_MS = 1.0
"""No server here takes less from one token to the next: 270 MB of weights are read for each."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of one load against one server. `load`: "saturated", "witness", "openvino", "curve@2.5" …"""

    side: Side
    setting: str
    alternation: int
    load: str
    requests_per_s: float
    ok: int
    sent: int
    ttft_p50_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0
    first_gap_p99_ms: float = 0.0
    attained: int = 0
    judged: int = 0
    client_cpu_share: float = 0.0  # of one core


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ratio` is ours over theirs, `spread` the least and greatest of single alternations.
    `requests`: behind the thinnest point of a goodput; where they are too few, nothing is said to be reached."""

    figure: str
    ours: float
    theirs: float | None
    their_setting: str
    ratio: float | None
    spread: tuple[float, float] | None
    target: str
    reached: bool | None
    requests: int | None = None


def load_name(part: str, rate: float) -> str:
    return f"{part}@{rate:g}"


def rate_of(load: str) -> float:
    return float(load.partition("@")[2])


def cell_of(session: Session, load: str, result: Mapping[str, Any]) -> Cell:
    """From a file of `python -m bench --save-result`."""
    summary = result["summary"]
    spread = {name: found or {} for name, found in summary["distributions"].items()}
    goodput = summary.get("goodput") or {}
    client = result["client"]
    return Cell(
        session.side,
        session.setting,
        session.alternation,
        load,
        requests_per_s=summary["requests_per_s"],
        ok=summary["by_outcome"]["ok"],
        sent=sum(summary["by_outcome"].values()),
        ttft_p50_ms=_quantile(spread, "ttft_ms", "p50"),
        itl_p50_ms=_quantile(spread, "itl_ms", "p50"),
        itl_p99_ms=_quantile(spread, "itl_ms", "p99"),
        first_gap_p99_ms=_quantile(spread, "first_gap_ms", "p99"),
        attained=goodput.get("attained", 0),
        judged=goodput.get("judged", 0),
        client_cpu_share=client["cpu_s"] / max(client["wall_s"], 1e-9),
    )


def _quantile(distributions: Mapping[str, Mapping[str, Any]], name: str, quantile: str) -> float:
    value = distributions.get(name, {}).get(quantile, 0.0)
    return float(value["value"] if isinstance(value, Mapping) else value)


def doubts(cell: Cell) -> str:
    """Why this run is not to be believed, "" where nothing speaks against it."""
    if cell.ok < cell.sent:
        return f"{cell.sent - cell.ok} of {cell.sent} requests failed"
    if cell.ttft_p50_ms and cell.itl_p50_ms < AT_LEAST_MS:
        return "text came all at once: the client was kept from the processor, or the server does not stream"
    return ""


# ------------------------------------------------------------ medians and the best


def values(cells: Iterable[Cell], side: Side, load: str, figure: str) -> dict[str, dict[int, float]]:
    """Setting → alternation → value."""
    found: dict[str, dict[int, float]] = {}
    for cell in cells:
        if cell.side == side and cell.load == load:
            found.setdefault(cell.setting, {})[cell.alternation] = getattr(cell, figure)
    return found


def best(of: Mapping[str, Mapping[int, float]], better: Better) -> str | None:
    """The setting with the best median; ties by name."""
    pick = max if better == "more" else min
    settings = sorted(setting for setting, values in of.items() if values)
    return pick(settings, key=lambda setting: median(of[setting].values()), default=None)


def compare(
    figure: str,
    ours: Mapping[int, float],
    theirs: Mapping[str, Mapping[int, float]],
    better: Better,
    target: float | None,
) -> Row | None:
    """None where we have no value. `theirs` may be empty."""
    if not ours:
        return None
    setting = best(theirs, better)
    if setting is None:
        return Row(figure, median(ours.values()), None, "", None, None, "", None)
    one, other = median(ours.values()), median(theirs[setting].values())
    return _against(figure, (one, other), (ours, theirs[setting]), setting, better, target)


def _against(
    figure: str,
    values: tuple[float, float],
    singles: tuple[Mapping[int, float], Mapping[int, float]],
    setting: str,
    better: Better,
    target: float | None,
) -> Row:
    """Ours and theirs, and of both the single alternations, which give the spread."""
    (mine, other), (ours, theirs) = values, singles
    ratio = mine / other if other else None
    each = [ours[n] / value for n, value in theirs.items() if n in ours and value]
    spread = (min(each), max(each)) if each else None
    sign = "≥" if better == "more" else "≤"
    reached = None
    if target is not None and ratio is not None:
        reached = ratio >= target if better == "more" else ratio <= target
    said = "" if target is None else f"{sign} {target:g}"
    return Row(figure, mine, other, setting, ratio, spread, said, reached)


def goodput_points(cells: Iterable[Cell], side: Side, setting: str) -> dict[int, dict[float, Point]]:
    """Alternation → rate → point."""
    found: dict[int, dict[float, Point]] = {}
    for cell in cells:
        if (cell.side, cell.setting) == (side, setting) and cell.load.startswith("goodput@"):
            found.setdefault(cell.alternation, {})[rate_of(cell.load)] = Point(cell.attained, cell.judged)
    return found


def pooled_goodput(cells: Sequence[Cell]) -> dict[tuple[Side, str], Points]:
    """All alternations together, of every server that was measured for it."""
    servers = dict.fromkeys((c.side, c.setting) for c in cells if c.load.startswith("goodput@"))
    return {server: pooled(goodput_points(cells, *server).values()) for server in servers}


def _goodputs(cells: Sequence[Cell], side: Side) -> dict[str, Points]:
    """Setting → the points its goodput is read from."""
    return {
        setting: thick_ones(points) for (s, setting), points in pooled_goodput(cells).items() if s == side
    }


def _best_goodput(of: Mapping[str, Points]) -> str | None:
    return best({setting: {0: crossing(points)} for setting, points in of.items()}, "more")


def _compare_goodput(
    cells: Sequence[Cell], figure: str, side: Side, theirs: Mapping[str, Points], target: float | None
) -> Row | None:
    """Our pools against the best of `theirs`, each rate from its pooled points."""
    ours, setting = _goodputs(cells, "kvferry").get("pools"), _best_goodput(theirs)
    if not ours:
        return None
    if setting is None:
        return Row(figure, crossing(ours), None, "", None, None, "", None, requests_behind(ours))
    values = crossing(ours), crossing(theirs[setting])
    singles = _singles(cells, "kvferry", "pools"), _singles(cells, side, setting)
    row = _against(figure, values, singles, setting, "more", target)
    requests = min(requests_behind(ours), requests_behind(theirs[setting]))
    return replace(row, requests=requests, reached=row.reached if requests >= ENOUGH else None)


def _singles(cells: Sequence[Cell], side: Side, setting: str) -> dict[int, float]:
    """Alternation → its own rate at 90 %."""
    return {n: crossing(points) for n, points in goodput_points(cells, side, setting).items()}


# ------------------------------------------------------------ the table


def rows(cells: Sequence[Cell], curve_rates: Sequence[float]) -> list[Row]:
    """What of the issue's table these cells say."""

    def ours(load: str, figure: str) -> Mapping[int, float]:
        return values(cells, "kvferry", load, figure).get("pools", {})

    def vllm(load: str, figure: str) -> Mapping[str, Mapping[int, float]]:
        return values(cells, "vllm", load, figure)

    rate = "requests_per_s"
    found = [
        compare("saturated, req/s", ours("saturated", rate), vllm("saturated", rate), "more", 1.3),
        compare("  by the peer's own client", ours("witness", rate), vllm("witness", rate), "more", None),
    ]
    openvino = values(cells, "openvino", "openvino", rate)
    if openvino:
        name = "saturated over HTTP, OpenVINO in process"
        found.append(compare(name, ours("saturated", rate), openvino, "more", 1.0))
    for per_s in curve_rates:
        load = load_name("curve", per_s)
        itl, ttft = f"ITL p99 at {per_s:g}/s, ms", f"TTFT p50 at {per_s:g}/s, ms"
        found.append(compare(itl, ours(load, "itl_p99_ms"), vllm(load, "itl_p99_ms"), "less", 0.8))
        found.append(compare(ttft, ours(load, "ttft_p50_ms"), vllm(load, "ttft_p50_ms"), "less", 1.1))
        steps = {n: gap / step for n, gap, step in _in_steps(cells, load)}
        found.append(_bound(f"first gap p99 at {per_s:g}/s, in decode steps", steps, 3.0))
    name = "goodput, req/s at 90 %"
    found.append(_compare_goodput(cells, name, "vllm", _goodputs(cells, "vllm"), 1.5))
    for setting, points in sorted(_goodputs(cells, "kvferry").items()):
        if setting != "pools":
            own = {setting: points}
            found.append(_compare_goodput(cells, f"  our own {setting}", "kvferry", own, None))
    return [row for row in found if row is not None]


def _in_steps(cells: Iterable[Cell], load: str) -> list[tuple[int, float, float]]:
    """Alternation, first gap's p99 and a decode step (the median gap) of our pools."""
    ours = [c for c in cells if (c.side, c.setting, c.load) == ("kvferry", "pools", load)]
    return [(c.alternation, c.first_gap_p99_ms, c.itl_p50_ms) for c in ours if c.itl_p50_ms]


def _bound(figure: str, ours: Mapping[int, float], at_most: float) -> Row | None:
    if not ours:
        return None
    value = median(ours.values())
    return Row(figure, value, None, "", None, None, f"≤ {at_most:g} steps", value <= at_most)


def winners(cells: Sequence[Cell], side: Side, curve_rates: Sequence[float]) -> set[str]:
    """Settings of a peer that were best at some figure."""
    if side == "openvino":
        return _named(best(values(cells, side, "openvino", "requests_per_s"), "more"))
    found = _named(best(values(cells, side, "saturated", "requests_per_s"), "more"))
    for rate in curve_rates:
        for figure in ("itl_p99_ms", "ttft_p50_ms"):
            found |= _named(best(values(cells, side, load_name("curve", rate), figure), "less"))
    return found | _named(_best_goodput(_goodputs(cells, side)))


def _named(setting: str | None) -> set[str]:
    return set() if setting is None else {setting}


def table(found: Sequence[Row]) -> str:
    heads = ("figure", "kvferry", "peer", "its setting", "ratio", "single ones", "to reach")
    lines = ["{:<43}{:>9}{:>9}  {:<12}{:>6}  {:<13}{:<11}requests a point".format(*heads)]
    for row in found:
        theirs = f"{row.theirs:9.2f}" if row.theirs is not None else " " * 9
        ratio = f"{row.ratio:6.2f}" if row.ratio is not None else " " * 6
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}" if row.spread else ""
        mark = {True: "✓", False: "✗", None: ""}[row.reached]
        line = f"{row.figure:<43}{row.ours:9.2f}{theirs}  {row.their_setting:<12}{ratio}  {spread:<13}"
        reach = f"{row.target} {mark}"
        lines.append(f"{line}{reach:<11}{_behind(row)}".rstrip())
    return "\n".join(lines)


def _behind(row: Row) -> str:
    if row.requests is None:
        return ""
    return f"{row.requests}" if row.requests >= ENOUGH else f"{row.requests}, too few (of {ENOUGH})"


def point_lines(cells: Sequence[Cell]) -> list[str]:
    """Every server's goodput points, all alternations together: rate, share in time, of how many."""
    return [
        f"{side} {setting}: "
        + ", ".join(f"{rate:g}/s {point.share:.1%} of {point.judged}" for rate, point in points.items())
        for (side, setting), points in pooled_goodput(cells).items()
    ]
