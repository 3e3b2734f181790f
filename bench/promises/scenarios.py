"""The loads that show whether promises are kept, each for a service that computes so many prompt tokens a second. Pure.

beside    interactive chat beside a batch tenant that floods, and that flood alone
overload  one tier at OVERLOAD times what the service can take
swing     a mix that goes from prompt-heavy to answer-heavy and back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.promises.asked import Asked, poisson, together
from common.config import Tier

OVERLOAD = 3.0
FLOOD = 1.5
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


BESIDE_TIERS: Mapping[str, Tier] = {
    "interactive": Tier(ttft_ms=1000, itl_ms=100, priority=0, weight=4),
    "batch": Tier(priority=1, max_queue=4096),
}
OVERLOAD_TIERS: Mapping[str, Tier] = {"chat": Tier(ttft_ms=1200, itl_ms=100, max_queue=4096)}
SWING_TIERS: Mapping[str, Tier] = {"chat": Tier(ttft_ms=1500, itl_ms=100, max_queue=4096)}


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
        prompt=(40, 160),
        output=(24, 64),
        from_s=0.1 * seconds,
    )
    return together(flood(capacity, seconds, seed), chat)


def overload(capacity: Capacity, seconds: float, seed: int) -> list[Asked]:
    rate = OVERLOAD * capacity.requests_per_s(900, 32)
    return poisson(seed, rate, seconds, tier="chat", tenant="crowd", prompt=(700, 1100), output=(16, 48))


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
