"""How much of the answer that it may have a request uses, learnt by tier from those that ended. Pure."""

from __future__ import annotations

MEMORY = 64
MOST_TIERS = 256


class AnswerLengths:
    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # share of max_tokens, a moving mean by tier

    def ended(self, tier: str, max_tokens: int, tokens: int) -> None:
        """A request of that tier came to its end."""
        used = min(1.0, tokens / max(1, max_tokens))
        before = self._used.get(tier)
        if before is None and len(self._used) >= MOST_TIERS:
            return
        self._used[tier] = used if before is None else before + (used - before) / MEMORY

    def expected(self, tier: str, max_tokens: int) -> int:
        """All of it where nothing is known."""
        return max(1, round(self._used.get(tier, 1.0) * max_tokens))
