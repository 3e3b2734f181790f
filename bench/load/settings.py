"""Every flag of `kvferry bench`, declared once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from bench.load.goodput import Targets, parse_targets
from bench.load.lengths import Span, parse_span
from common.flags import flag, parse, visible_fields
from common.http_settings import API_KEY_VARIABLE, Strict

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROMPTS = 100

DESCRIPTION = """Loads any OpenAI-compatible service and measures it at the client. Without flags: 100 requests of
256 tokens in, 64 out, at one a second, Poisson, against a service on this machine. TTFT runs from the moment a request
is sent (opening a connection included) to the first byte of the first chunk with text; ITL from one chunk with text to
the next; TPOT from first to last text over the tokens after the first, as the server counts them; end to end to
[DONE]. Prompts are fresh in every run unless --seed is given, so that a prefix cache has not seen them. All randomness
comes from the seed, which is printed and saved. Ctrl-C prints what there is. Exit codes: 0 measured, even where
requests failed (the last line says how many did); 1 where none was answered, the service cannot be reached or Ctrl-C
ended it; 2 for flags that do not go."""


def _numbers(value: object) -> object:
    """'1,2,3.5' → a tuple."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError("expected rates with commas between, as in 1,2,3.5") from None


def _json_object(text: str) -> str:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return text


def _targets(words: tuple[str, ...]) -> tuple[str, ...]:
    parse_targets(words)
    return words


Lengths = Annotated[Span, BeforeValidator(parse_span)]
Rates = Annotated[list[Annotated[float, Field(gt=0)]], BeforeValidator(_numbers)]


class BenchSettings(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    base_url: str = flag(DEFAULT_URL, "the service", "service", metavar="URL")
    endpoint: Literal["/v1/completions", "/v1/chat/completions"] = flag(
        "/v1/completions", "what is asked", "service"
    )
    model: str | None = flag(None, "as the service names it; absent: the first of /v1/models", "service")
    api_key: str | None = flag(
        None, f"where the service asks for one; or set {API_KEY_VARIABLE}", "service", metavar="KEY"
    )
    ca_certs: str | None = flag(None, "who may have signed its certificate, PEM", "service", metavar="FILE")
    insecure: bool = flag(False, "take any certificate", "service")

    request_rate: float = flag(
        1.0,
        "requests per second that arrive; inf: all at once, as --max-concurrency lets them",
        "arrivals",
        gt=0,
        allow_inf_nan=True,
    )
    burstiness: float = flag(
        1.0,
        "shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts, more is more even",
        "arrivals",
        gt=0,
    )
    max_concurrency: int | None = flag(
        None,
        "most requests at once. With --request-rate inf this is a closed loop of so many users; with a finite rate, "
        "who finds no place waits, and the report says how long (not counted in TTFT)",
        "arrivals",
        ge=1,
    )
    trace: Path | None = flag(
        None,
        "times and lengths from a trace: Azure 2023 (csv) or Mooncake (a JSON object a line, or csv with "
        "hash_id_ranges; hash_ids become prefixes that requests share). Not part of kvferry",
        "arrivals",
        metavar="FILE",
    )
    trace_scale: float = flag(
        1.0, "arrivals of the trace come so many times as fast", "arrivals", gt=0, metavar="X"
    )
    trace_length_scale: float = flag(
        1.0, "its lengths, and its shared blocks, times this", "arrivals", gt=0, metavar="X"
    )

    input_len: Lengths = flag(
        Span(256, 256),
        "tokens of a prompt: 256, or 128:512 for uniform between",
        "prompts and answers",
        metavar="N[:M]",
    )
    output_len: Lengths = flag(
        Span(64, 64), "tokens of an answer, likewise", "prompts and answers", metavar="N[:M]"
    )
    prefix_len: int = flag(
        0,
        "tokens before every prompt, the same in all: what a prefix cache finds",
        "prompts and answers",
        ge=0,
    )
    prompt_as: Literal["auto", "ids", "words"] = flag(
        "auto",
        "ids: token ids, exactly as many as wanted; words: text of so many common words, for chat and for servers that "
        "take no ids; auto: ids in completions where the server takes them",
        "prompts and answers",
    )
    token_ids: Lengths = flag(
        Span(1000, 29999), "ids are drawn from here: no special tokens of any usual vocabulary", "prompts and answers",
        metavar="N:M",
    )  # fmt: skip
    ignore_eos: bool = flag(
        True, "answers have exactly the wanted length (vLLM's field `ignore_eos`)", "prompts and answers"
    )
    temperature: float = flag(0.0, "0 is greedy", "prompts and answers", ge=0)
    extra_body: Annotated[str, AfterValidator(_json_object)] = flag(
        "", "more fields of every request, a JSON object", "prompts and answers", metavar="JSON"
    )
    abort_fraction: float = flag(
        0.0,
        "share of requests whose client leaves in the middle of the answer",
        "prompts and answers",
        ge=0,
        le=1,
    )

    num_prompts: int | None = flag(
        None,
        f"requests of a run; default {DEFAULT_PROMPTS}, or all of a trace, or as many as --duration lets come",
        "length of a run",
        ge=1,
    )
    duration: float | None = flag(
        None, "seconds in which requests arrive; those that are there then end in peace", "length of a run", gt=0,
    )  # fmt: skip
    num_warmups: int = flag(
        4, "requests before the run, at most 4 at once, not counted", "length of a run", ge=0
    )
    request_timeout: float = flag(
        300.0, "seconds for a request, its connection included", "length of a run", gt=0
    )
    connect_timeout: float = flag(10.0, "seconds for a connection", "length of a run", gt=0)
    seed: int | None = flag(
        None, "of times, lengths, prompts and who leaves; absent: a new one", "length of a run", ge=0
    )

    goodput: Annotated[tuple[str, ...], AfterValidator(_targets)] = flag(
        (),
        "targets in ms that a request attains or not: ttft:500 itl:75 tpot:50 e2e:5000. Every single gap has "
        "to be within itl",
        "what is measured",
        metavar="NAME:MS",
        several=True,
    )
    server_metrics: bool = flag(
        True,
        "also ask the server: queue time, hand-over gap, preemptions, transfers (/metrics, /admin of kvferry)",
        "what is measured",
    )

    save_result: Path | None = flag(
        None, "all settings, figures and requests as JSON", "results", metavar="FILE.json"
    )
    plot: Path | None = flag(
        None, "TTFT and ITL as distributions, throughput over time; of several runs the curve (matplotlib)", "results",
        metavar="FILE.png",
    )  # fmt: skip
    compare: tuple[Path, ...] = flag(
        (), "no run: saved results (or sweeps) beside each other, and over the first", "results", metavar="FILE.json",
        several=True,
    )  # fmt: skip
    progress: bool = flag(True, "a progress bar where a person looks", "results")

    sweep_rate: Rates | None = flag(
        None, "one run at each of these rates, and the curve", "several runs", metavar="R,R,…"
    )
    find_rate: float | None = flag(
        None,
        "finds the highest rate at which this share of requests attains --goodput, by doubling --request-rate and then "
        "halving the interval",
        "several runs",
        gt=0,
        lt=1,
        metavar="SHARE",
    )
    find_rate_within: float = flag(
        0.05,
        "stop when the bounds of that rate are so near, relative",
        "several runs",
        gt=0,
        lt=1,
        metavar="SHARE",
    )

    @property
    def extra_fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.extra_body or "{}")
        return found

    @property
    def targets(self) -> Targets:
        return parse_targets(self.goodput)

    @model_validator(mode="after")
    def _fits_together(self) -> BenchSettings:
        if self.find_rate is not None and not self.goodput:
            raise ValueError("--find-rate: needs targets: --goodput ttft:500 itl:75")
        if self.find_rate is not None and self.sweep_rate:
            raise ValueError("--find-rate: not together with --sweep-rate")
        if (self.find_rate is not None or self.sweep_rate) and self.trace is not None:
            raise ValueError(
                "--trace: has rates of its own; use --trace-scale instead of --sweep-rate or --find-rate"
            )
        limits = (self.max_concurrency, self.num_prompts, self.trace, self.find_rate, self.sweep_rate)
        if self.request_rate == float("inf") and self.duration is not None and limits == (None,) * 5:
            raise ValueError("--duration: of requests all at once, needs --max-concurrency or --num-prompts")
        if len(self.compare) == 1:
            raise ValueError("--compare: expected two files or more")
        if self.prompt_as == "ids" and self.endpoint != "/v1/completions":
            raise ValueError("--prompt-as ids: chat takes text only")
        if self.trace is not None and self.prefix_len:
            raise ValueError("--prefix-len: a trace says itself what is shared")
        return self


def parse_bench(argv: Sequence[str], environ: Mapping[str, str]) -> BenchSettings:
    """Raises BadConfiguration, which names the flag."""
    values: dict[str, Any] = {}
    if key := environ.get(API_KEY_VARIABLE, "").split(",")[0]:
        values["api_key"] = key
    return parse(
        BenchSettings,
        argv,
        prog="kvferry bench",
        description=DESCRIPTION,
        file_keys=visible_fields(BenchSettings),
        values=values,
    )
