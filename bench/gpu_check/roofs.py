"""What this device can do at best, measured in the same run: bytes copied and products of matrices per second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.gpu_check.findings import RoofName, Speed
from bench.gpu_check.places import Place

COPIED_BYTES = 4 << 30
SIDES = (4096, 8192)


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes read and written per second by a copy; operations (a multiply-add is two) per second by torch's product."""

    copy_bytes_per_s: float
    matrix_ops_per_s: float
    copied_bytes: int
    side: int

    def share(self, seconds: float, moved_bytes: float, operations: float) -> float:
        """Of the time, how much the roof alone would take."""
        return max(moved_bytes / self.copy_bytes_per_s, operations / self.matrix_ops_per_s) / seconds

    def speed(
        self,
        part: str,
        what: str,
        seconds: float,
        *,
        moved_bytes: float,
        operations: float = 0.0,
        roof: RoofName = "copy",
        target: float | None = None,
        note: str = "",
    ) -> Speed:
        done = moved_bytes if roof == "copy" else operations
        return Speed(
            part,
            what,
            seconds,
            done / seconds,
            roof,
            self.share(seconds, moved_bytes, operations),
            target,
            note,
        )


def measure_roofs(place: Place) -> Roofs:
    copied = COPIED_BYTES if place.on_gpu else 1 << 20
    source = torch.ones(copied, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copy_s = place.clock.device_s(lambda: target.copy_(source))
    rates: dict[int, float] = {}
    for side in SIDES if place.on_gpu else (64,):
        left, right = place.random(side, side), place.random(side, side, seed=1)
        product = torch.empty_like(left)
        taken_s = place.clock.device_s(lambda a=left, b=right, c=product: torch.mm(a, b, out=c))  # type: ignore[misc]
        rates[side] = 2 * side**3 / taken_s
    best = max(rates, key=lambda side: rates[side])
    return Roofs(2 * copied / copy_s, rates[best], copied, best)


def said(roofs: Roofs) -> Iterator[Speed]:
    """As findings of their own."""
    moved, done = 2 * roofs.copied_bytes, 2 * roofs.side**3
    copy, product = roofs.copy_bytes_per_s, roofs.matrix_ops_per_s
    yield Speed("roof", f"copy of {roofs.copied_bytes} bytes, read and written", moved / copy, copy, "copy")
    yield Speed("roof", f"product {roofs.side} × {roofs.side}", done / product, product, "matrix")
