"""How long prompts and answers are: fixed, or uniform between two bounds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DRAWN_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def parse_span(value: object) -> object:
    """'256' or '128:512'; what is no text is left for others to judge. Raises ValueError."""
    if not isinstance(value, (str, int)):
        return value
    low, _, high = str(value).partition(":")
    try:
        span = Span(int(low), int(high or low))
    except ValueError:
        raise ValueError("expected a number of tokens, or two as in 128:512") from None
    if not 1 <= span.low <= span.high:
        raise ValueError("expected at least one token, and the lesser number first")
    return span


def lengths(span: Span, seed: int) -> Iterator[int]:
    """Without end."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.integers(span.low, span.high + 1, DRAWN_AT_ONCE).tolist()
