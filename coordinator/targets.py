"""What a tier promises. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Tier


@dataclass(frozen=True, slots=True)
class Targets:
    """Of one tier, in seconds; None: no promise."""

    ttft_s: float | None = None
    itl_s: float | None = None


NO_TARGETS = Targets()


def targets_of(tier: Tier) -> Targets:
    seconds = [None if target is None else target / 1e3 for target in (tier.ttft_ms, tier.itl_ms)]
    return Targets(*seconds)
