"""`kvferry bench`, `python -m bench`: settings in, tables, JSON and PNG out.

Exit codes: 0 measured, 2 bad flags, 1 where nothing could be measured or Ctrl-C ended it early. Requests that fail are
a measurement too, of a service under too much load, so the code stays 0 and the last line says how many did.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.load import plots, table, tables_of_several as several
from bench.load.from_settings import bench_of, head_of, load_of, within_context
from bench.load.measure import Bench, CannotMeasure, Learned, learn, measure
from bench.load.plan import Load, stream_seed
from bench.load.progress import progress_bar
from bench.load.rate_search import RateSearch
from bench.load.records import Run
from bench.load.result_file import BadResult, as_json, is_sweep, plain, read_result, row_of
from bench.load.server_facts import ServerSide, Unreachable
from bench.load.settings import BenchSettings, parse_bench
from bench.load.summary import Summary, summarize, summary_of_stalls
from bench.load.surroundings import surroundings
from bench.pictures import why_no_picture
from common.errors import BadConfiguration
from coordinator.admin_client import wide_console

SEED_BITS = 48
FIRST_RUN_SEED = 100
"""Runs of a sweep have seeds of their own, or the later ones would find their prompts in the server's cache."""


@dataclass(frozen=True, slots=True)
class Measured:
    run: Run
    server: ServerSide | None
    summary: Summary


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = parse_bench(sys.argv[1:] if argv is None else argv, os.environ)
        _require_places(settings)
        return _compare(settings) if settings.compare else _load(settings)
    except BadConfiguration as error:
        return _fail(str(error), error.exit_code)
    except (Unreachable, CannotMeasure) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 1


def _require_places(settings: BenchSettings) -> None:
    """What would fail after a run of minutes is to be said before it. Raises BadConfiguration."""
    if settings.plot is not None and (why := why_no_picture()):
        raise BadConfiguration(f"--plot: {why}")
    for flag, path in (("--save-result", settings.save_result), ("--plot", settings.plot)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise BadConfiguration(f"{flag} {path}: cannot be written there")


def _fail(why: str, code: int) -> int:
    print(f"kvferry bench: {why}", file=sys.stderr)
    return code


def _load(settings: BenchSettings) -> int:
    seed = settings.seed if settings.seed is not None else secrets.randbits(SEED_BITS)
    load = load_of(settings)
    bench = bench_of(settings)
    with closing(bench.server):
        load = within_context(load, bench.facts.max_model_len)
        learned = uvloop.run(learn(bench, settings.prompt_as, seed))
        if settings.sweep_rate or settings.find_rate is not None:
            return _several_runs(settings, bench, load, learned, seed)
        return _one_run(settings, bench, load, learned, seed)


def _measure(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> Measured:
    with progress_bar(load.num_requests, enabled=settings.progress) as tell:
        run, server = uvloop.run(measure(bench, load, learned, seed, tell))
    return Measured(run, server, summarize(run.records, settings.targets, seed))


def _one_run(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> int:
    found = _measure(settings, bench, load, learned, seed)
    run, summary = found.run, found.summary
    head = head_of(settings, bench, load, learned, seed)
    wide_console().print(table.report(summary, found.server, head, run))
    rows = [row_of(record) for record in run.records]
    _save(settings, {**_about(settings, bench, head, seed), **_figures(found), "requests": rows})
    if settings.plot is not None:
        plots.plot_runs(settings.plot, {bench.facts.kind: {"requests": rows}})
    _say_failures([plain(summary)])
    if run.interrupted:
        return _fail("ended by Ctrl-C: the figures are those of what was done by then", 1)
    return 0 if summary.completed else _fail("no request was answered", 1)


def _about(settings: BenchSettings, bench: Bench, head: dict[str, str], seed: int) -> dict[str, Any]:
    return {
        "settings": {**settings.model_dump(exclude={"api_key"}), "seed": seed},
        "arrivals": head["arrivals"],
        "lengths": head["lengths"],
        "cache_state": head["cache"],
        "surroundings": surroundings(),
        "service": bench.facts,
    }


def _figures(found: Measured) -> dict[str, Any]:
    run = found.run
    client = {"cpu_s": run.cpu_s, "wall_s": run.wall_s, "interrupted": run.interrupted}
    stalls_ms = summary_of_stalls(run.stalls_s)
    return {"summary": found.summary, "server": found.server, "client": {**client, "stalls_ms": stalls_ms}}


def _save(settings: BenchSettings, result: dict[str, Any]) -> None:
    if settings.save_result is None:
        return
    try:
        settings.save_result.write_text(as_json(result))
    except OSError as error:
        raise BadConfiguration(f"--save-result {settings.save_result}: {error.strerror}") from error


# ------------------------------------------------------------ several runs


def _several_runs(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> int:
    """One after the other, at given rates or at those that the search asks for."""
    console = wide_console()
    first_rate = settings.request_rate if math.isfinite(settings.request_rate) else 1.0
    search = RateSearch(first_rate, settings.find_rate or 0.0, settings.find_rate_within)
    given = iter(settings.sweep_rate or ())
    points: list[dict[str, Any]] = []
    interrupted = False
    while not interrupted:
        rate = search.next_rate() if settings.find_rate is not None else next(given, None)
        if rate is None:
            break
        run_seed = stream_seed(seed, FIRST_RUN_SEED + len(points))
        found = _measure(settings, bench, replace(load, rate=rate), learned, run_seed)
        interrupted = found.run.interrupted
        points.append(plain({"rate": rate, "seed": run_seed, **_figures(found)}))
        console.print(several.curve(points[-1:]))
        summary = found.summary
        if summary.goodput is not None:
            search.tell(rate, summary.goodput.share.value, summary.arrivals_s, summary.duration_s)
    head = head_of(settings, bench, load, learned, seed) | {"arrivals": _rates_in_words(settings, points)}
    console.print(several.curve_report(head, points))
    rates = {
        "found": search.found(),
        "passing": search.passing,
        "failing": search.failing,
        "too_few": search.too_few,
    }
    if settings.find_rate is not None:
        console.print(several.rate_line(settings.find_rate, str(settings.targets), search), markup=False)
    result = {**_about(settings, bench, head, seed), "points": points, "rate": rates}
    _save(settings, result)
    if settings.plot is not None and points:
        plots.plot_curves(settings.plot, {bench.facts.kind: result})
    _say_failures([point["summary"] for point in points])
    return _fail("ended by Ctrl-C: the curve is of what was done by then", 1) if interrupted else 0


def _say_failures(summaries: Sequence[dict[str, Any]]) -> None:
    if said := several.failures_line(summaries):
        wide_console().print(said, markup=False, highlight=False)


def _rates_in_words(settings: BenchSettings, points: Sequence[dict[str, Any]]) -> str:
    kind = "Poisson" if settings.burstiness == 1 else f"gamma, burstiness {settings.burstiness:g}"
    return f"{len(points)} rates, each {kind}"


# ------------------------------------------------------------ saved results


def _compare(settings: BenchSettings) -> int:
    results = {path.stem: _read(path) for path in settings.compare}
    if len(results) < len(settings.compare):
        raise BadConfiguration("--compare: two files have the same name; the table needs names that differ")
    sweeps = [name for name, result in results.items() if is_sweep(result)]
    if sweeps and len(sweeps) < len(results):
        raise BadConfiguration(f"--compare: {sweeps[0]} holds several runs, another file one")
    console = wide_console()
    if sweeps:
        for name, result in results.items():
            console.print(name, several.curve(result["points"]))
    else:
        console.print(several.comparison(results))
    if settings.plot is not None:
        (plots.plot_curves if sweeps else plots.plot_runs)(settings.plot, results)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_result(path.read_text())
    except (OSError, UnicodeDecodeError, BadResult) as error:
        raise BadConfiguration(f"--compare {path}: {error}") from None
