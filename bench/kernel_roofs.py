"""What one thread of this machine can do at best, measured on the spot: bytes read and operations done per second.

The read bandwidth is that of a step's largest stream, the weights: a buffer of their size in memory of the same kind
(huge pages where the kernel gives them) is read from end to end, again and again, as step after step reads them. So
where a processor's cache holds a part of the weights from step to step, it holds as much of the buffer. Several
readers are tried, since no one of them is the fastest everywhere, and the best counts.

The arithmetic rate is that of the best product of square matrices that torch makes in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from bench.kernel_timing import least_s
from kernels.cache import dtype_name, huge_pages

SQUARES = (512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Roofs:
    read_bytes_per_s: float
    reader: str
    buffer_bytes: int
    flops_per_s: float
    square: int
    dtype: str

    def or_better(self, other: Roofs) -> Roofs:
        """Of each the higher: measured twice, since neighbours can make a roof look low, never high."""
        reading, computing = (self if self.read_bytes_per_s > other.read_bytes_per_s else other), self
        if other.flops_per_s > self.flops_per_s:
            computing = other
        return replace(reading, flops_per_s=computing.flops_per_s, square=computing.square)

    def describe(self) -> str:
        return (
            f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s ({self.buffer_bytes / 1e6:.0f} MB over and over, as weights "
            f"are; best reader: {self.reader}); computes {self.flops_per_s / 1e9:.0f} GFLOP/s in {self.dtype} "
            f"(torch.mm of {self.square} × {self.square})"
        )


def measure_roofs(buffer_bytes: int, dtype: torch.dtype, seconds: float, squares: tuple[int, ...]) -> Roofs:
    """`seconds` for each reader and each square, on the calling thread's own number of threads."""
    readers = _readers(buffer_bytes)
    speeds = {name: buffer_bytes / least_s(read, seconds) for name, read in readers.items()}
    reader = max(speeds, key=lambda name: speeds[name])
    rates = {side: 2 * side**3 / least_s(_square(side, dtype), seconds) for side in squares}
    square = max(rates, key=lambda side: rates[side])
    return Roofs(speeds[reader], reader, buffer_bytes, rates[square], square, dtype_name(dtype))


def _readers(buffer_bytes: int) -> dict[str, Callable[[], object]]:
    buffer = torch.frombuffer(huge_pages(buffer_bytes), dtype=torch.int32)
    buffer.fill_(1)
    floats, numbers, raw = buffer.view(torch.float32), buffer.numpy(), buffer.numpy().view(np.uint8)
    return {
        "torch sum of fp32": floats.sum,
        "torch max of int32": buffer.max,
        "numpy max of int32": numbers.max,
        "xxh3": lambda: xxhash.xxh3_64_intdigest(raw.data),
    }


def _square(side: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    return lambda: torch.mm(left, right)
