"""What is measured in what order: sessions, each of one server in one setting, in turn. Pure.

    alternation 1    kvferry │ vllm 64 │ vllm 128 │ vllm 256 │ vllm default │ openvino 256 │ …
    alternation 2    kvferry │ …

Never two servers at once, and each alternation has all of them, so what drifts in the machine drifts through all of
them alike. With `winners_only` the later alternations leave out settings of the peer that were best at no figure of
the first, and ask the witness no more: each session costs the peer's start, about a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["kvferry", "vllm", "openvino"]
Part = Literal["saturated", "curve", "goodput", "openvino", "baselines"]
PARTS: tuple[Part, ...] = ("saturated", "curve", "goodput", "openvino", "baselines")

VLLM_BUDGETS = ("64", "128", "256", "default")
OPENVINO_BUDGETS = ("256", "512", "1024")
BATCH = 16  # requests at once in the saturated runs, and members of a batch of the request-level baselines
BASELINES: dict[str, tuple[str, ...]] = {
    "collocated": ("--prefill", "0"),
    "collocated-128": ("--prefill", "0", "--max-num-batched-tokens", "128"),
    "dynamic": ("--prefill", "0", "--batching", "dynamic", "--max-num-seqs", str(BATCH)),
    "static": ("--prefill", "0", "--batching", "dynamic", "--batch-timeout-ms", "0", "--max-num-seqs", str(BATCH)),
}  # fmt: skip
"""Our own other modes. Each has the machine for itself, as the pools have; the collocated one its best budget too."""

START_S = {"kvferry": 12.0, "vllm": 75.0, "openvino": 10.0}
SATURATED_PER_S = 4.0
GOODPUT_POINTS = 4
GOODPUT_PER_S = 3.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """`goodput` requests a point and alternation: a point has `alternations` times as many."""

    alternations: int = 3
    saturated: int = 96
    curve: int = 120
    goodput: int = 100
    winners_only: bool = False


QUICK = Sizes(saturated=48, curve=60, goodput=40, winners_only=True)


@dataclass(frozen=True, slots=True)
class Session:
    """One server, started once. `flags` are its own beside those that every session of its side has."""

    side: Side
    setting: str
    alternation: int
    parts: tuple[Part, ...]
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.alternation}-{self.side}-{self.setting}"


def sessions_of(
    alternation: int, parts: Sequence[Part], vllm_settings: Iterable[str], openvino_settings: Iterable[str]
) -> list[Session]:
    """One alternation, in order."""
    served: tuple[Part, ...] = tuple(part for part in ("saturated", "curve", "goodput") if part in parts)
    ours = list(served)
    if "openvino" in parts and "saturated" not in ours:
        ours.insert(0, "saturated")
    if "baselines" in parts and "goodput" not in ours:
        ours.append("goodput")
    sessions = [Session("kvferry", "pools", alternation, tuple(ours))]
    if served:
        sessions += [
            Session("vllm", budget, alternation, served, _budget_flags(budget)) for budget in vllm_settings
        ]
    if "openvino" in parts:
        sessions += [Session("openvino", budget, alternation, ("openvino",)) for budget in openvino_settings]
    if "baselines" in parts:
        sessions += [
            Session("kvferry", name, alternation, ("goodput",), flags) for name, flags in BASELINES.items()
        ]
    return sessions


def _budget_flags(budget: str) -> tuple[str, ...]:
    return () if budget == "default" else ("--max-num-batched-tokens", budget)


def estimate_s(
    sessions: Iterable[Session], sizes: Sizes, curve_rates: Sequence[float], time_scale: float = 1.0
) -> float:
    """Roughly how long these take, from what such sessions took on two cores."""
    cost_s: dict[Part, float] = {
        "saturated": time_scale * 2 * sizes.saturated / SATURATED_PER_S,  # by our client and by the witness
        "curve": sum(sizes.curve / rate + 3 for rate in curve_rates),
        "goodput": GOODPUT_POINTS * (time_scale * sizes.goodput / GOODPUT_PER_S + 3),
        "openvino": time_scale * sizes.saturated / SATURATED_PER_S,
        "baselines": 0.0,
    }
    return sum(START_S[session.side] + sum(cost_s[part] for part in session.parts) for session in sessions)


def estimate_all_s(
    parts: Sequence[Part],
    sizes: Sizes,
    curve_rates: Sequence[float],
    vllm: Sequence[str],
    openvino: Sequence[str],
    time_scale: float = 1.0,
) -> float:
    """All alternations; of winners two are assumed for each peer."""
    first = estimate_s(sessions_of(1, parts, vllm, openvino), sizes, curve_rates, time_scale)
    if sizes.winners_only:
        vllm, openvino = vllm[:2], openvino[:1]
    later = estimate_s(sessions_of(2, parts, vllm, openvino), sizes, curve_rates, time_scale)
    return first + (sizes.alternations - 1) * later
