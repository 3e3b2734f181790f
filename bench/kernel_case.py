"""One kernel at one size: how it is run, what it is compared with, and what this machine could do at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.kernel_roofs import Roofs
from bench.kernel_timing import least_s


@dataclass(frozen=True, slots=True)
class Case:
    """`check` runs kernel and reference on the same fresh data and gives the largest difference, as a share of the
    reference's largest value. One `run` moves `moved_bytes` and does `operations` (a multiply-add is two) and takes
    as long as `reference_times` runs of `reference`."""

    kernel: str
    size: str
    run: Callable[[], object]
    reference: Callable[[], object]
    check: Callable[[], float]
    allowed: float
    moved_bytes: int
    operations: int
    reference_times: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    kernel: str
    size: str
    run_ms: float
    reference_ms: float
    floor_ms: float
    """Bytes over the read bandwidth, or operations over the arithmetic rate, whichever is longer."""
    gb_per_s: float
    gflop_per_s: float
    difference: float

    @property
    def over_floor(self) -> float:
        return self.run_ms / self.floor_ms

    @property
    def speedup(self) -> float:
        return self.reference_ms / self.run_ms

    def under(self, roofs: Roofs) -> Measured:
        """The same times under other roofs."""
        of_roof = max(self.gb_per_s / roofs.read_bytes_per_s, self.gflop_per_s / roofs.flops_per_s) * 1e9
        return replace(self, floor_ms=self.run_ms * of_roof)


class WrongResult(RuntimeError):
    """A kernel and its reference differ: how fast it is does not matter then."""


def measure(case: Case, roofs: Roofs, seconds: float) -> Measured:
    """Compares, then takes the least of as many runs as fit into `seconds`; the reference gets as long. Raises
    WrongResult."""
    with torch.inference_mode():
        difference = case.check()
        if not difference <= case.allowed:  # a NaN is wrong too
            raise WrongResult(
                f"{case.kernel}, {case.size}: off by {difference:.2g}, allowed are {case.allowed:.2g}"
            )
        run_s = least_s(case.run, seconds)
        reference_s = least_s(case.reference, seconds) * case.reference_times
    floor_s = max(case.moved_bytes / roofs.read_bytes_per_s, case.operations / roofs.flops_per_s)
    return Measured(
        kernel=case.kernel,
        size=case.size,
        run_ms=run_s * 1e3,
        reference_ms=reference_s * 1e3,
        floor_ms=floor_s * 1e3,
        gb_per_s=case.moved_bytes / run_s / 1e9,
        gflop_per_s=case.operations / run_s / 1e9,
        difference=difference,
    )


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, as a share of the largest wanted value; NaN where either has one."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())
