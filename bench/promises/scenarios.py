"""The loads that show whether promises are kept, each for a service that computes so many prompt tokens a second. Pure.

beside    interactive chat beside a batch tenant that floods, and that flood alone
overload  one tier at OVERLOAD times what the service can take, its targets by the step times of the machine
swing     a mix that goes from prompt-heavy to answer-heavy and back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.promises.asked import Asked, poisson, together
from bench.virtual_worker import StepTime
from common.config import Tier
from coordinator.step_costs import CAUTION, LEAST_CHUNK, prompt_seconds

OVERLOAD = 3.0
FLOOD = 2.0
CHAT_RATE = 0.6
SWING_LOAD = 1.3


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a service, in tokens a second: of prompts where those are computed, of answers where those are decoded."""

    prompt_tokens_per_s: float
    answer_tokens_per_s: float

    def requests_per_s(self, prompt: float, output: float) -> float:
        """Whichever pool is full first."""
        return min(self.prompt_tokens_per_s / prompt, self.answer_tokens_per_s / output)


BATCH = Tier(priority=1, max_queue=4096)
CHAT_PROMPT = (40, 160)


def beside_tiers(prefill: StepTime, decode: StepTime, rows: int, budget: int = 256) -> dict[str, Tier]:
    """Targets that a person would want, or where the machine is too slow for those, what it can do: a first token in
    half as long again as a whole chunk and the longest prompt take, a gap as long as a full decode batch with the least
    chunk of local prefill beside it."""
    prompt_s = sum(time_s(prefill, 1, tokens, 0) for tokens in (budget, CHAT_PROMPT[1]))
    gap_s = time_s(decode, rows, rows + LEAST_CHUNK, 300 * rows) / CAUTION
    ttft_ms, itl_ms = max(1000.0, 1500 * prompt_s), max(100.0, 1000 * gap_s)
    interactive = Tier(ttft_ms=round(ttft_ms), itl_ms=round(itl_ms), priority=0, weight=4)
    return {"interactive": interactive, "batch": BATCH}


def time_s(step: StepTime, rows: float, tokens: float, context: float) -> float:
    return step.base_s + step.row_s * rows + step.token_s * tokens + step.context_s * context


UNPROMISED: Mapping[str, Tier] = {"chat": Tier(max_queue=4096)}
OVERLOAD_PROMPT, OVERLOAD_OUTPUT = (700, 1100), (16, 48)
OVERLOAD_TTFT, OVERLOAD_ITL = 3.5, 2.8
"""Targets of the overload: so many times what a prompt of mean length takes alone, and a step of a full batch."""
SPREAD = 2 / 9  # of lengths, to both sides of the mean
LEAST_PROMPT = 128


def overload_prompt(capacity: Capacity, seconds: float, refused: int) -> tuple[int, int]:
    """Lengths of prompts: those of OVERLOAD_PROMPT, or on a slow machine shorter ones, of which as many are refused as
    are to be looked at."""
    tokens = (OVERLOAD - 1) * capacity.prompt_tokens_per_s * seconds
    mean = min(sum(OVERLOAD_PROMPT) / 2, max(LEAST_PROMPT, tokens / max(1, refused)))
    return round((1 - SPREAD) * mean), round((1 + SPREAD) * mean)


def overload_tiers(
    prefill: StepTime,
    decode: StepTime,
    rows: int,
    prompts: tuple[int, int] = OVERLOAD_PROMPT,
    budget: int = 256,
) -> dict[str, Tier]:
    """With targets that suit a machine of such step times and prompts of such lengths. (A context as long as there will
    be and no longer: what it costs is the least sure of a fit.)"""
    prompt = sum(prompts) // 2
    model = (prefill.base_s, prefill.row_s, prefill.context_s, prefill.token_s)
    alone_s = prompt_seconds(model, prompt, budget)
    ttft_ms, itl_ms = (
        1e3 * OVERLOAD_TTFT * alone_s,
        1e3 * OVERLOAD_ITL * time_s(decode, rows, rows, rows * prompt),
    )
    return {"chat": Tier(ttft_ms=round(ttft_ms), itl_ms=round(itl_ms), max_queue=4096)}


def with_local_prefill(
    capacity: Capacity,
    decode: StepTime,
    tier: Tier,
    rows: int,
    prompts: tuple[int, int] = OVERLOAD_PROMPT,
) -> Capacity:
    """Of a service whose decode worker computes prompts too, beside half a batch, within the tier's ITL target."""
    step_s = CAUTION * (tier.itl_ms or 0.0) / 1e3
    half, context = rows / 2, sum(prompts) / 2
    chunk = max(0.0, step_s - time_s(decode, half, half, half * context)) / decode.token_s
    return replace(capacity, prompt_tokens_per_s=capacity.prompt_tokens_per_s + chunk / step_s)


SWING_TIERS: Mapping[str, Tier] = {"chat": Tier(ttft_ms=1500, itl_ms=100, max_queue=4096)}


def swing_tiers(prefill: StepTime, decode: StepTime, rows: int) -> Mapping[str, Tier]:
    """Targets that a person would want, or where the machine is too slow for those, what it can do."""
    wanted, able = SWING_TIERS["chat"], overload_tiers(prefill, decode, rows)["chat"]
    ttft_ms = max(wanted.ttft_ms or 0.0, able.ttft_ms or 0.0)
    itl_ms = max(wanted.itl_ms or 0.0, able.itl_ms or 0.0)
    return {"chat": Tier(ttft_ms=ttft_ms, itl_ms=itl_ms, max_queue=4096)}


def flood(capacity: Capacity, seconds: float, seed: int) -> list[Asked]:
    rate = FLOOD * capacity.requests_per_s(300, 64)
    return poisson(seed, rate, seconds, tier="batch", tenant="batch", prompt=(200, 400), output=(32, 96))


def beside(capacity: Capacity, seconds: float, seed: int) -> list[Asked]:
    chat = poisson(
        seed + 1,
        CHAT_RATE,
        seconds,
        tier="interactive",
        tenant="chat",
        prompt=CHAT_PROMPT,
        output=(24, 64),
        from_s=0.1 * seconds,
    )
    return together(flood(capacity, seconds, seed), chat)


def overload(
    capacity: Capacity, seconds: float, seed: int, prompts: tuple[int, int] = OVERLOAD_PROMPT
) -> list[Asked]:
    rate = OVERLOAD * capacity.requests_per_s(sum(prompts) / 2, sum(OVERLOAD_OUTPUT) / 2)
    return poisson(seed, rate, seconds, tier="chat", tenant="crowd", prompt=prompts, output=OVERLOAD_OUTPUT)


SWING_PHASES: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...] = (
    ("prompt-heavy", (700, 1100), (8, 24)),
    ("answer-heavy", (32, 96), (96, 192)),
    ("prompt-heavy", (700, 1100), (8, 24)),
)


def swing(rates: Mapping[str, float], seconds: float, seed: int) -> list[Asked]:
    """`rates`: requests a second in each kind of phase."""
    each_s = seconds / len(SWING_PHASES)
    parts = [
        poisson(
            seed + number,
            rates[name],
            (number + 1) * each_s,
            tier="chat",
            tenant="mix",
            prompt=prompt,
            output=output,
            from_s=number * each_s,
        )
        for number, (name, prompt, output) in enumerate(SWING_PHASES)
    ]
    return together(*parts)


def swing_rates(capacity: Capacity) -> dict[str, float]:
    """A little more than fixed pools can take in the phases that are heavy for one of them."""
    rates = {}
    for name, prompt, output in SWING_PHASES:
        mean_prompt, mean_output = sum(prompt) / 2, sum(output) / 2
        rates[name] = SWING_LOAD * capacity.requests_per_s(mean_prompt, mean_output)
    return rates
