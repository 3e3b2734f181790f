"""`kvferry bench`, `python -m bench`: settings in, tables, JSON and PNG out.

Exit codes: 0 measured, 2 bad flags, 1 where nothing could be measured or Ctrl-C ended it early.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import uvloop

from bench.load import table
from bench.load.bodies import BodyShape
from bench.load.client import BadUrl, target_of
from bench.load.measure import Bench, CannotMeasure, Learned, Limits, learn, measure
from bench.load.plan import Load
from bench.load.progress import progress_bar
from bench.load.result_file import BadResult, as_json, read_result, row_of
from bench.load.server_facts import Server, Unreachable
from bench.load.settings import DEFAULT_PROMPTS, BenchSettings, parse_bench
from bench.load.summary import summarize
from bench.load.surroundings import surroundings
from bench.load.traces import BadTrace, read_trace, scaled
from common.errors import BadConfiguration
from coordinator.admin_client import wide_console
from coordinator.door.tls import client_context

SEED_BITS = 48


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = parse_bench(sys.argv[1:] if argv is None else argv, os.environ)
        return _compare(settings) if settings.compare else _load(settings)
    except BadConfiguration as error:
        return _fail(str(error), error.exit_code)
    except (Unreachable, CannotMeasure) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 1


def _fail(why: str, code: int) -> int:
    print(f"kvferry bench: {why}", file=sys.stderr)
    return code


def _load(settings: BenchSettings) -> int:
    seed = settings.seed if settings.seed is not None else secrets.randbits(SEED_BITS)
    load = _load_of(settings)
    bench = _bench(settings)
    with closing(bench.server):
        learned = uvloop.run(learn(bench, settings.prompt_as, seed))
        return _one_run(settings, bench, load, learned, seed)


def _one_run(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> int:
    with progress_bar(load.num_requests, enabled=settings.progress) as tell:
        run, server = uvloop.run(measure(bench, load, learned, seed, tell))
    summary = summarize(run.records, settings.targets, seed)
    head = _head(settings, bench, load, learned, seed)
    wide_console().print(table.report(summary, server, head, run.cpu_s, run.wall_s))
    result = {
        "settings": {**settings.model_dump(mode="python", exclude={"api_key"}), "seed": seed},
        "arrivals": head["arrivals"],
        "lengths": head["lengths"],
        "cache_state": head["cache"],
        "surroundings": surroundings(),
        "server": {"facts": bench.facts, "side": server},
        "client": {"cpu_s": run.cpu_s, "wall_s": run.wall_s, "interrupted": run.interrupted},
        "summary": summary,
        "requests": [row_of(record) for record in run.records],
    }
    _save(settings, as_json(result))
    if run.interrupted:
        return _fail("ended by Ctrl-C: the figures are those of what was done by then", 1)
    return 0 if summary.completed else _fail("no request was answered", 1)


def _save(settings: BenchSettings, text: str) -> None:
    if settings.save_result is None:
        return
    try:
        settings.save_result.write_text(text)
    except OSError as error:
        raise BadConfiguration(f"--save-result {settings.save_result}: {error.strerror}") from error


# ------------------------------------------------------------ from settings


def _bench(settings: BenchSettings) -> Bench:
    tls = client_context(settings.ca_certs, insecure=settings.insecure)
    base_url = settings.base_url.rstrip("/").removesuffix("/v1")
    try:
        target = target_of(base_url, settings.endpoint, tls, settings.api_key or "")
    except BadUrl as error:
        raise BadConfiguration(f"--base-url {settings.base_url}: {error}") from None
    server = Server(base_url, settings.api_key or "", tls)
    facts = server.facts(settings.model)
    shape = BodyShape(
        facts.model,
        settings.endpoint.endswith("chat/completions"),
        settings.temperature,
        settings.ignore_eos,
        _extra(settings.extra_body),
    )
    limits = Limits(
        settings.max_concurrency, settings.request_timeout, settings.connect_timeout, settings.num_warmups
    )
    ids = settings.token_ids
    return Bench(target, server, facts, shape, limits, ids.low, ids.high, settings.server_metrics)


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise BadConfiguration(f"--extra-body: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadConfiguration("--extra-body: expected a JSON object")
    return found


def _load_of(settings: BenchSettings) -> Load:
    trace = None
    num_prompts = settings.num_prompts
    if settings.trace is not None:
        try:
            with settings.trace.open() as lines:
                trace = scaled(read_trace(lines), settings.trace_scale, settings.trace_length_scale)
        except OSError as error:
            raise BadConfiguration(f"--trace {settings.trace}: {error.strerror}") from None
        except (BadTrace, UnicodeDecodeError) as error:
            raise BadConfiguration(f"--trace {settings.trace}: {error}") from None
        num_prompts = min(num_prompts or len(trace.rows), len(trace.rows))
    elif num_prompts is None and settings.duration is None:
        num_prompts = DEFAULT_PROMPTS
    return Load(
        settings.request_rate,
        settings.burstiness,
        settings.input_len,
        settings.output_len,
        settings.prefix_len,
        settings.abort_fraction,
        num_prompts,
        settings.duration,
        trace,
    )


def _head(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> dict[str, str]:
    facts = bench.facts
    return {
        "service": f"{facts.kind} {facts.version} at {settings.base_url}{settings.endpoint}, model {facts.model}",
        "arrivals": _arrivals(settings, load),
        "lengths": _lengths(settings, load, learned),
        "cache": _cache(load, settings.seed is not None),
        "seed": str(seed),
    }


def _arrivals(settings: BenchSettings, load: Load) -> str:
    if load.trace is not None:
        said = f"{load.trace.format} trace {settings.trace}, {settings.trace_scale:g} times as fast"
        if load.trace.spread_over_s:
            said += f", equal stamps spread over {load.trace.spread_over_s:g} s"
    elif load.rate == float("inf"):
        said = "all at once"
    else:
        kind = "Poisson" if load.burstiness == 1 else f"gamma, burstiness {load.burstiness:g}"
        said = f"{load.rate:g} a second, {kind}"
    return said + (f", at most {settings.max_concurrency} at once" if settings.max_concurrency else "")


def _lengths(settings: BenchSettings, load: Load, learned: Learned) -> str:
    kind = "token ids"
    if learned.words is not None:
        kind = "words" if learned.words.exact else f"words of about {learned.words.per_word:.2f} tokens"
    if load.trace is not None:
        return f"from the trace, times {settings.trace_length_scale:g}, prompts as {kind}"
    return f"{load.input_len} tokens in, {load.output_len} out, prompts as {kind}"


def _cache(load: Load, repeated: bool) -> str:
    if load.trace is not None and load.trace.block_tokens:
        shared = f"prefixes shared by the trace's blocks of {load.trace.block_tokens} tokens"
    elif load.prefix_len:
        shared = f"the first {load.prefix_len} tokens are the same in all"
    else:
        shared = "fresh prompts"
    return shared + ("; --seed was given: the server may have seen them" if repeated else "")


# ------------------------------------------------------------ saved results


def _compare(settings: BenchSettings) -> int:
    results = [_read(path) for path in settings.compare]
    names = [path.stem for path in settings.compare]
    wide_console().print(table.comparison(names, results))
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_result(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"--compare {path}: {error}") from None
    except BadResult as error:
        raise BadConfiguration(f"--compare {path}: {error}") from None
