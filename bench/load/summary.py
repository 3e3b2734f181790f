"""Figures of one run from its records. Pure.

Throughput is over the time from the start of the run to the end of its last request, the emptying of the service
included. Tokens are those of whole answers; what was refused, failed or left brings none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.load.goodput import Goodput, Targets, goodput
from bench.load.records import OUTCOMES, Record
from bench.load.statistics import Distribution, distribution

Samples = Callable[[Record], Iterable[float | None]]

MEASURES: dict[str, tuple[str, Samples]] = {
    "ttft_ms": ("TTFT", lambda of: [of.ttft_s]),
    "itl_ms": ("ITL", lambda of: of.gaps_s),
    "first_gap_ms": ("first gap (hand-over)", lambda of: of.gaps_s[:1]),
    "worst_gap_ms": ("worst gap of a request", lambda of: [max(of.gaps_s)] if len(of.text_s) > 1 else []),
    "tpot_ms": ("TPOT", lambda of: [of.tpot_s]),
    "e2e_ms": ("end to end", lambda of: [of.e2e_s]),
    "late_ms": ("sent after its time", lambda of: [of.late_s]),
    "connect_ms": ("connect, in TTFT", lambda of: [of.connect_s]),
}
"""Name in the JSON → name in the table, samples in seconds. All but the last two of whole answers only."""
OF_EVERY_REQUEST = ("late_ms", "connect_ms")


@dataclass(frozen=True, slots=True)
class Summary:
    """`by_outcome` has every outcome; `faults` counts what went wrong, by kind."""

    duration_s: float
    arrivals_s: float
    by_outcome: dict[str, int]
    faults: dict[str, int]
    first_words: dict[str, str]
    requests_per_s: float
    offered_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    prompts_as_asked: int
    outputs_as_asked: int
    tokens_counted_by_server: bool
    tokens_per_chunk: float
    distributions: dict[str, Distribution | None]
    goodput: Goodput | None

    @property
    def completed(self) -> int:
        return self.by_outcome["ok"]

    @property
    def sent(self) -> int:
        return sum(self.by_outcome.values())


def summarize(records: Sequence[Record], targets: Targets, seed: int) -> Summary:
    """`seed`: of the bootstrap."""
    whole = [record for record in records if record.outcome == "ok"]
    duration_s = max((record.end_s for record in records), default=0.0)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    faults = [record for record in records if record.outcome in ("rejected", "failed")]
    output_tokens = sum(record.tokens for record in whole)
    input_tokens = sum(_prompt_tokens(record) for record in whole)
    cached = [record.cached_tokens for record in whole if record.cached_tokens is not None]
    chunks = sum(len(record.text_s) for record in whole)
    return Summary(
        duration_s=duration_s,
        arrivals_s=max((record.due_s for record in records), default=0.0),
        by_outcome={outcome: sum(record.outcome == outcome for record in records) for outcome in OUTCOMES},
        faults=dict(Counter(record.fault for record in faults).most_common()),
        first_words={record.fault: record.words for record in reversed(faults)},
        requests_per_s=len(whole) * per_s,
        offered_per_s=_offered_per_s(records),
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        prompts_as_asked=sum(record.prompt_tokens == record.asked_prompt_tokens for record in whole),
        outputs_as_asked=sum(record.tokens == record.asked_output_tokens for record in whole),
        tokens_counted_by_server=bool(whole) and all(record.output_tokens is not None for record in whole),
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        distributions={name: _distribution(records, name, seed) for name in MEASURES},
        goodput=goodput(records, targets, duration_s) if targets else None,
    )


def _prompt_tokens(record: Record) -> int:
    return record.prompt_tokens if record.prompt_tokens is not None else record.asked_prompt_tokens


def _offered_per_s(records: Sequence[Record]) -> float:
    """Arrivals over the time in which they came; 0 where all came at once."""
    last_s = max((record.due_s for record in records), default=0.0)
    return len(records) / last_s if last_s > 0 else 0.0


def _distribution(records: Sequence[Record], name: str, seed: int) -> Distribution | None:
    _, samples = MEASURES[name]
    if name == "late_ms" and all(record.due_s == 0 for record in records):
        return None  # a closed loop: nothing has a time of its own
    of = [record for record in records if record.outcome == "ok" or name in OF_EVERY_REQUEST]
    return distribution([[s * 1e3 for s in samples(record) if s is not None] for record in of], seed)


def summary_of_stalls(stalls_s: Sequence[float]) -> dict[str, float]:
    """How late the client's own event loop woke, in ms."""
    if not stalls_s:
        return {}
    ordered = sorted(stalls_s)
    return {
        "p50": ordered[len(ordered) // 2] * 1e3,
        "p99": ordered[len(ordered) * 99 // 100] * 1e3,
        "max": ordered[-1] * 1e3,
    }
