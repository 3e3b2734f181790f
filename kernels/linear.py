"""Linear layers of torch that give a row the same bits whatever other rows share the call.

On GPUs, and on CPUs where the C extension was not built (kernels/products.py chooses).

Why a probe: whether a matrix product is batch-invariant is a property of the library, the processor, the
dtype and the shape. Measured with packed oneDNN weights: on AMD without AMX any count from 2 rows up gives equal
bits; on Intel with AMX the bits change with the blocking that the row count selects (up to 32 rows one blocking,
above another, for some layers a third from 160 up), but never with the row's place or its neighbours. So each
(shape, dtype) is tried once at load, with inputs made to expose summation order, against a few row policies.

A policy `(granule, longest)` pads the rows with zeros to a multiple of `granule` and cuts them into calls of at most
`longest` rows. Only `granule` decides the bits: every allowed call equals the reference, one granule on one thread.
Any count first, because it pads nothing; then 64 before 32 and 16, because with AMX a call of 64 rows costs 10 % more
than one of 16 while a prompt chunk of 256 rows in one call costs a quarter of eight calls of 32. The order is
fixed, and time plays no part, so every process on a machine chooses the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """Which row counts one call may have. `least` is the smallest (a single row may take another code path)."""

    granule: int
    least: int
    longest: int

    def padded_rows(self, rows: int) -> int:
        return max(-(-rows // self.granule) * self.granule, self.least)

    def describe(self) -> str:
        return f"any>={self.least}" if self.granule == 1 else f"x{self.granule}"


_POLICIES = (
    *(RowPolicy(1, 2, longest) for longest in (512, 128, 64)),
    *(RowPolicy(64, 64, longest) for longest in (512, 256, 128, 64)),
    *(RowPolicy(tile, tile, tile) for tile in (32, 16)),
)
CUDA_TILE = RowPolicy(64, 64, 64)
# Multiply-adds that the probe spends per policy and thread count: 0.1 s on one slow core. It limits `longest` and the
# number of row counts compared on very wide layers, by shape alone.
_PROBE_BUDGET_MACS = 4e9


class NoInvariantProduct(RuntimeError):
    """No way to multiply was found that is exact between batches on this machine."""


class ProbedLinear:
    """`y = x @ weight.T + bias`, x `[rows, in]`, y `[rows, out]` in `dtype`, bit-stable per row."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        choices: "ProbedProducts",
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        choice = choices.choose(self.out_features, self.in_features, dtype)
        self.policy = choice.policy
        self._compute_dtype = choice.compute_dtype
        cast = weight.to(choice.compute_dtype).contiguous()
        self._product = choice.make(cast, None if bias is None else bias.to(choice.compute_dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        x = x.to(self._compute_dtype).contiguous()
        wanted = self.policy.padded_rows(rows)
        if wanted != rows:
            x = F.pad(x, (0, 0, 0, wanted - rows))
        if wanted <= self.policy.longest:
            y = self._product(x)
        else:
            y = torch.cat([self._product(part) for part in _cuts(x, self.policy)])
        return y[:rows].to(self.dtype)


def _cuts(x: torch.Tensor, policy: RowPolicy) -> list[torch.Tensor]:
    """Pieces of at most `longest` rows, none shorter than `least`."""
    starts = list(range(0, x.shape[0], policy.longest))
    if x.shape[0] - starts[-1] < policy.least:
        starts[-1] -= policy.least - (x.shape[0] - starts[-1])
    return [x[a:b].contiguous() for a, b in zip(starts, [*starts[1:], x.shape[0]], strict=True)]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one shape is multiplied: a way (`make` prepares a weight), the dtype it runs in, its row policy."""

    way: str
    compute_dtype: torch.dtype
    policy: RowPolicy
    make: Callable[[torch.Tensor, torch.Tensor | None], Product]

    def describe(self) -> str:
        return f"{self.way}:{str(self.compute_dtype).removeprefix('torch.')}:{self.policy.describe()}"


class ProbedProducts:
    """Remembers the probe's answer per (out, in, dtype), so that thirty equal layers are tried once."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._threads = threads
        self._known: dict[tuple[int, int, torch.dtype], Choice] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> ProbedLinear:
        return ProbedLinear(weight, bias, out_dtype, self)

    def choose(self, out_features: int, in_features: int, dtype: torch.dtype) -> Choice:
        key = (out_features, in_features, dtype)
        if key not in self._known:
            self._known[key] = self._choose(out_features, in_features, dtype)
        return self._known[key]

    def describe(self) -> dict[str, str]:
        """Shape and dtype to way and policy: bits differ between workers that differ here."""
        return {
            f"{out}x{inner}:{str(dtype).removeprefix('torch.')}": choice.describe()
            for (out, inner, dtype), choice in sorted(self._known.items(), key=lambda item: str(item[0]))
        }

    def _choose(self, out_features: int, in_features: int, dtype: torch.dtype) -> Choice:
        if self._device.type != "cpu":
            # A fixed shape always takes the same kernel, and a row of a tile never depends on its neighbours.
            return Choice("tile", dtype, CUDA_TILE, _plain)
        # A packed weight in its own dtype; fp32 arithmetic where the processor cannot (fp16 on many) or will not.
        for way, make in (("packed", _packed), ("plain", _plain)):
            for compute_dtype in dict.fromkeys((dtype, torch.float32)):
                policy = probe(make, out_features, in_features, compute_dtype, self._threads)
                if policy is not None:
                    return Choice(way, compute_dtype, policy, make)
        raise NoInvariantProduct(
            f"linear {out_features}x{in_features} {dtype}: no row policy gives stable bits"
        )


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """oneDNN with the weight reordered once into the processor's preferred blocking."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y

    return product


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return partial(F.linear, weight=weight, bias=bias)


def probe(
    make: Callable[[torch.Tensor, torch.Tensor | None], Product],
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    threads: int,
) -> RowPolicy | None:
    """The first policy under which every row count, place and thread count gives a row equal bits, or None."""
    generator = torch.Generator().manual_seed(out_features * 1_000_003 + in_features)
    weight, x = cancelling_pair(out_features, in_features, 512, dtype, generator)
    before = torch.get_num_threads()
    try:
        try:
            product = make(weight, None)
            product(x[:2])
        except RuntimeError:  # this dtype has no packed form on this processor
            return None
        affordable_rows = int(_PROBE_BUDGET_MACS / (out_features * in_features))
        for policy in _POLICIES:
            if policy.longest > max(policy.least, 64) and 2 * policy.longest > affordable_rows:
                continue
            if _holds(product, x, policy, _counts(policy, affordable_rows), sorted({1, 2, threads})):
                return policy
        return None
    finally:
        torch.set_num_threads(before)


def cancelling_pair(
    out_features: int, in_features: int, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and inputs whose exact products are zero, so that results are nothing but rounding.

    With ordinary inputs a changed order of summation moves a bf16 result in one of some 100,000 cases, and a
    probe would pass by luck. Here every change of order shows.
    """
    half = max(in_features // 2, 1)
    distinct = min(out_features, 1024)  # a vocabulary of random rows would take longer to make than to try
    weight = torch.zeros(distinct, in_features, dtype=dtype)
    x = torch.zeros(rows, in_features, dtype=dtype)
    weight[:, :half] = torch.randn(distinct, half, generator=generator).to(dtype)
    x[:, :half] = torch.randn(rows, half, generator=generator).to(dtype)
    if in_features > 1:
        order = torch.randperm(half, generator=generator)
        weight[:, half : 2 * half] = -weight[:, order]
        x[:, half : 2 * half] = x[:, order]
    return weight.repeat(-(-out_features // distinct), 1)[:out_features].contiguous(), x


def _holds(
    product: Product, x: torch.Tensor, policy: RowPolicy, counts: list[int], thread_counts: list[int]
) -> bool:
    """Compares allowed calls of many lengths with the reference: tiles of `least` rows, one thread."""
    torch.set_num_threads(1)
    least, longest = policy.least, policy.longest
    # Eight tiles spread over the rows are enough, since the same ones are looked for in every longer call.
    starts = sorted({(step * (longest - least) // 7) // least * least for step in range(8)})
    tiles = {start: product(x[start : start + least].contiguous()) for start in starts}
    if least > 2:
        # The place inside a tile: the same rows moved by an odd step, next to other rows.
        moved = product(torch.cat([x[least - 5 : least], x[: least - 5]]))
        if not torch.equal(moved, torch.cat([tiles[0][least - 5 :], tiles[0][: least - 5]])):
            return False
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for count in counts:
            y = product(x[:count].contiguous())
            if not all(torch.equal(y[a : a + least], tiles[a]) for a in starts if a + least <= count):
                return False
            # The same rows again, each one place further up.
            if (
                policy.granule == 1
                and least < count < x.shape[0]
                and not torch.equal(product(x[1 : count + 1].contiguous())[:-1], y[1:])
            ):
                return False
    return True


def _counts(policy: RowPolicy, affordable_rows: int) -> list[int]:
    """Row counts to try, the ends and the usual block edges first, as many as the budget allows."""
    if policy.granule > 1:
        return list(range(policy.least, policy.longest + 1, policy.granule))
    edges = (
        2,
        policy.longest,
        16,
        17,
        33,
        3,
        64,
        65,
        31,
        128,
        129,
        256,
        5,
        7,
        8,
        100,
        257,
        384,
        13,
        32,
        48,
        63,
        200,
    )
    chosen: list[int] = []
    for count in edges:
        if count <= policy.longest and sum(chosen) + count <= affordable_rows and count not in chosen:
            chosen.append(count)
    return chosen
