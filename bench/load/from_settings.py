"""From flags to what a run is made of, and the words that say so at the head of its report."""

from __future__ import annotations

from dataclasses import replace

from bench.load.bodies import BodyShape
from bench.load.client import BadUrl, target_of
from bench.load.measure import Bench, Learned, Limits
from bench.load.plan import Load
from bench.load.server_facts import Facts, Server
from bench.load.settings import DEFAULT_PROMPTS, BenchSettings
from bench.load.traces import BadTrace, fitting, read_trace, scaled
from common.errors import BadConfiguration
from coordinator.door.tls import client_context


def bench_of(settings: BenchSettings) -> Bench:
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
        settings.extra_fields,
    )
    limits = Limits(
        settings.max_concurrency, settings.request_timeout, settings.connect_timeout, settings.num_warmups
    )
    ids = settings.token_ids
    return Bench(target, server, facts, shape, limits, ids.low, ids.high, settings.server_metrics)


def load_of(settings: BenchSettings) -> Load:
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


def within_context(load: Load, max_model_len: int | None) -> Load:
    """Without rows of its trace that the model cannot hold, where the service says how much it can. Raises
    BadConfiguration where a drawn request would not fit, or no row does."""
    if max_model_len is None:
        return load
    if load.trace is None:
        _require_fit(load, max_model_len)
        return load
    try:
        trace = fitting(load.trace, max_model_len)
    except BadTrace as error:
        raise BadConfiguration(f"--trace: {error}") from None
    return replace(load, trace=trace, num_requests=min(load.num_requests or len(trace.rows), len(trace.rows)))


def _require_fit(load: Load, max_model_len: int) -> None:
    longest = load.prefix_len + load.input_len.high + load.output_len.high
    if longest > max_model_len:
        prefix = f"--prefix-len {load.prefix_len}, " if load.prefix_len else ""
        raise BadConfiguration(
            f"{prefix}--input-len {load.input_len}, --output-len {load.output_len}: up to {longest} tokens, and the "
            f"service's model holds {max_model_len} (its max_model_len)"
        )


def head_of(settings: BenchSettings, bench: Bench, load: Load, learned: Learned, seed: int) -> dict[str, str]:
    facts = bench.facts
    version = f" {facts.version}" if facts.version else ""
    return {
        "service": f"{facts.kind}{version} at {settings.base_url}{settings.endpoint}, model {facts.model}",
        **({"workers": _workers(facts)} if facts.workers else {}),
        "arrivals": _arrivals(settings, load),
        "lengths": _lengths(settings, load, learned),
        "cache": _cache(load, settings.seed is not None),
        "seed": str(seed),
    }


def _workers(facts: Facts) -> str:
    """Policy and budgets of each, for a kvferry."""
    return "; ".join(
        f"{row.get('id')} {row.get('batching', '')} batching, {row.get('max_num_seqs')} sequences and "
        f"{row.get('max_num_batched_tokens')} tokens a step, {row.get('threads')} threads on {row.get('device')}"
        for row in facts.workers
    )


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
        said = f"from the trace, times {settings.trace_length_scale:g}, prompts as {kind}"
        left_out = load.trace.left_out
        return said + (f"; {left_out} rows left out, longer than the model's context" if left_out else "")
    return f"{load.input_len} tokens in, {load.output_len} out, prompts as {kind}"


def _cache(load: Load, repeated: bool) -> str:
    if load.trace is not None and load.trace.block_tokens:
        shared = f"prefixes shared by the trace's blocks of {load.trace.block_tokens} tokens"
    elif load.prefix_len:
        shared = f"the first {load.prefix_len} tokens are the same in all"
    else:
        shared = "fresh prompts"
    return shared + ("; --seed was given: the server may have seen them" if repeated else "")
