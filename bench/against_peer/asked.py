"""What is asked of every side alike: rates, targets and number format. Pure.

The rates and targets are those of a machine on which vLLM's CPU build serves 4.5 requests a second. On a slower one
both sides would be far beyond what they can take, and nothing would be told apart: there `time_scale` stretches time,
rates divided by it and targets multiplied, for both sides alike. It is said with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.against_peer.search import Grid

Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")

CURVE_RATES = (2.5, 3.5)
FIRST_GOODPUT_RATE = 2.5
TTFT_MS, ITL_MS = 500.0, 75.0
PROMISED = '{"service_tier": "promised"}'
"""More of a request's body, to a kvferry with these `tiers`."""


@dataclass(frozen=True, slots=True)
class Asked:
    time_scale: float = 1.0
    dtype: Dtype = "bfloat16"

    @property
    def curve_rates(self) -> tuple[float, ...]:
        """Requests a second."""
        return tuple(rate / self.time_scale for rate in CURVE_RATES)

    @property
    def first_goodput_rate(self) -> float:
        return FIRST_GOODPUT_RATE / self.time_scale

    @property
    def grid(self) -> Grid:
        """Of the rates at which goodput is looked for."""
        return Grid().slower(self.time_scale)

    @property
    def ttft_ms(self) -> float:
        return TTFT_MS * self.time_scale

    @property
    def itl_ms(self) -> float:
        return ITL_MS * self.time_scale

    @property
    def targets(self) -> tuple[str, str]:
        """As `--goodput` takes them."""
        return f"ttft:{self.ttft_ms:g}", f"itl:{self.itl_ms:g}"

    @property
    def in_time(self) -> str:
        """The same in words."""
        return f"TTFT ≤ {self.ttft_ms:g} ms and every gap ≤ {self.itl_ms:g} ms"

    @property
    def tiers(self) -> str:
        """The same as configuration of a kvferry: it is told what is wanted of it, where that is asked for; the other
        side's answer to that is the best of its budgets. Who asks for throughput alone asks for no promise, and is
        refused by no forecast."""
        return f"[tiers.default]\n\n[tiers.promised]\nttft_ms = {self.ttft_ms:g}\nitl_ms = {self.itl_ms:g}\n"
