"""The kernels of a model's layers, and sampling, each against torch or numpy: sizes, bytes and operations of each.

Shapes are a model's own (`ModelConfig`); the numbers in them are random and fresh. Made one at a time, for a case
holds its weights or its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from bench.kernel_case import Case, difference
from common.request import SamplingParams
from kernels.backend import Backend, TorchBackend, choose_backend
from kernels.cache import CacheLayout, PagedCache
from kernels.model_config import ModelConfig
from kernels.products import choose_products
from kernels.rope import make_rope_table
from kernels.sampler import choose_sampler
from kernels.sampling import Draw, NumpySampler
from kernels.step import StepLayout

# Of the largest value. bf16 has eight bits, and sums of 1,536 products go through it once.
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
BLOCK_SIZE = 16
EPS = 1e-5
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: Sequence[int] = (1, 16, 256)
    head_rows: Sequence[int] = (1, 16)
    decode: Sequence[tuple[int, int]] = ((16, 512),)
    """Sequences, and tokens of each."""
    chunk: Sequence[tuple[int, int]] = ((256, 0), (256, 1024))
    """Queries, and tokens before them."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a model and the flags fix for all cases."""

    config: ModelConfig
    dtype: torch.dtype
    threads: int

    @property
    def allowed(self) -> float:
        return ALLOWED[self.dtype]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name to (out, in), as `load_model` joins them."""
        c = self.config
        attended, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return {
            "qkv": (attended + 2 * kv, c.hidden_size),
            "attention output": (c.hidden_size, attended),
            "gate and up": (2 * c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }

    def backend(self) -> Backend:
        return choose_backend(CPU, self.config.head_dim, BLOCK_SIZE, self.threads, self.dtype)


def kernel_cases(shapes: Shapes, sizes: Sizes) -> Iterator[Case]:
    layers = shapes.config.num_layers
    for name, shape in shapes.linears.items():
        for rows in sizes.rows:
            yield linear_case(f"linear, all layers: {name}", shapes, shape, rows, shapes.dtype, layers)
    head = (shapes.config.vocab_size, shapes.config.hidden_size)
    for rows in sizes.head_rows:
        yield linear_case("output head", shapes, head, rows, torch.float32, 1)
    for count, length in sizes.decode:
        yield attention_case("decode attention, all layers", shapes, [(length - 1, 1)] * count)
    for count, before in sizes.chunk:
        yield attention_case("chunk attention, all layers", shapes, [(before, count)])
    for rows in sizes.rows:
        yield norm_case(shapes, rows)
        yield silu_case(shapes, rows)
        yield rope_case(shapes, rows)
    for rows in sizes.head_rows:
        yield from sampling_cases(shapes.config.vocab_size, rows)


def linear_case(
    name: str, shapes: Shapes, shape: tuple[int, int], rows: int, out_dtype: torch.dtype, layers: int
) -> Case:
    """As many equal layers as a step has, one after the other: a weight is not in a cache since its last use."""
    out, inner = shape
    weight = (torch.randn(out, inner) / inner**0.5).to(shapes.dtype)
    x = torch.randn(rows, inner).to(shapes.dtype)
    products = choose_products(CPU, shapes.threads)
    ours = [products.linear(weight, None, out_dtype) for _ in range(layers)]
    theirs = [weight.clone() for _ in range(layers)]
    item = shapes.dtype.itemsize
    return Case(
        kernel=f"{name} {out}×{inner}",
        size=f"{rows} rows",
        run=lambda: [linear(x) for linear in ours],
        reference=lambda: [F.linear(x, weight) for weight in theirs],
        check=lambda: difference(ours[-1](x), F.linear(x.double(), weight.double())),
        allowed=shapes.allowed,
        moved_bytes=layers * ((out * inner + rows * inner) * item + rows * out * out_dtype.itemsize),
        operations=layers * 2 * rows * out * inner,
    )


def attention_case(name: str, shapes: Shapes, rows: Sequence[tuple[int, int]]) -> Case:
    """`rows`: (tokens before, queries) of each. Blocks lie scattered; every layer's are read once, as in a step."""
    config = shapes.config
    layout = CacheLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, shapes.dtype)
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    width = -(-int((starts + counts).max()) // BLOCK_SIZE)
    blocks = (
        np.random.default_rng(0).permutation(len(rows) * width).astype(np.int32).reshape(len(rows), width)
    )
    step = StepLayout.make(starts, counts, blocks, BLOCK_SIZE, CPU)
    cache = PagedCache(layout, blocks.size)
    for part in cache.tensor:
        part.normal_()
    q = torch.randn(step.num_tokens, config.num_heads, config.head_dim)
    ours, theirs = shapes.backend(), TorchBackend()
    layers = range(config.num_layers)
    seen = sum(int(count) * int(start) + int(count) * (int(count) + 1) // 2 for start, count in rows)
    keys = int((starts + counts).sum())
    return Case(
        kernel=name,
        size=" + ".join(_texts(rows)),
        run=lambda: [ours.attention(q, step, cache, layer) for layer in layers],
        reference=lambda: theirs.attention(q, step, cache, 0),
        check=lambda: max(
            difference(ours.attention(q, step, cache, layer), theirs.attention(q, step, cache, layer))
            for layer in (0, layers[-1])
        ),
        allowed=shapes.allowed,
        moved_bytes=len(layers) * keys * 2 * config.num_kv_heads * config.head_dim * shapes.dtype.itemsize,
        operations=len(layers) * 4 * seen * config.num_heads * config.head_dim,
        reference_times=len(layers),
    )


def _texts(rows: Sequence[tuple[int, int]]) -> list[str]:
    alike = {row: rows.count(row) for row in rows}
    return [
        f"{times} × {before + 1} tokens" if queries == 1 else f"{queries} on {before}"
        for (before, queries), times in alike.items()
    ]


def norm_case(shapes: Shapes, rows: int) -> Case:
    hidden = shapes.config.hidden_size
    x, residual = (torch.randn(rows, hidden).to(shapes.dtype) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(hidden)
    ours, theirs = shapes.backend(), TorchBackend()

    def check() -> float:
        found, found_sum = ours.add_rms_norm(x, residual.clone(), weight, EPS)
        wanted, wanted_sum = theirs.add_rms_norm(x, residual.clone(), weight, EPS)
        return max(difference(found, wanted), difference(found_sum, wanted_sum))

    kept = residual.clone()  # it is added to in every run, and may be overwritten
    return Case(
        kernel="add and RMS norm",
        size=f"{rows} rows",
        run=lambda: ours.add_rms_norm(x, kept.zero_(), weight, EPS),
        reference=lambda: theirs.add_rms_norm(x, kept.zero_(), weight, EPS),
        check=check,
        allowed=shapes.allowed,
        moved_bytes=4 * rows * hidden * shapes.dtype.itemsize,
        operations=5 * rows * hidden,
    )


def silu_case(shapes: Shapes, rows: int) -> Case:
    inner = shapes.config.intermediate_size
    x = torch.randn(rows, 2 * inner).to(shapes.dtype)
    ours, theirs = shapes.backend(), TorchBackend()
    return Case(
        kernel="SiLU · up",
        size=f"{rows} rows",
        run=lambda: ours.silu_mul(x),
        reference=lambda: theirs.silu_mul(x),
        check=lambda: difference(ours.silu_mul(x), theirs.silu_mul(x)),
        allowed=shapes.allowed,
        moved_bytes=3 * rows * inner * shapes.dtype.itemsize,
        operations=5 * rows * inner,
    )


def rope_case(shapes: Shapes, rows: int) -> Case:
    """One sequence each, at its tenth token."""
    config = shapes.config
    layout = CacheLayout(1, config.num_kv_heads, config.head_dim, BLOCK_SIZE, shapes.dtype)
    caches = [PagedCache(layout, rows) for _ in range(2)]
    tables = np.arange(rows, dtype=np.int32)[:, None]
    starts, counts = np.full(rows, 9, dtype=np.int32), np.ones(rows, dtype=np.int32)
    step = StepLayout.make(starts, counts, tables, BLOCK_SIZE, CPU)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(rows, width).to(shapes.dtype)
    norms = None
    if config.qk_norm:
        norms = (1 + 0.1 * torch.randn(config.head_dim), 1 + 0.1 * torch.randn(config.head_dim))
    table = make_rope_table(config, BLOCK_SIZE, CPU)
    ours, theirs = shapes.backend(), TorchBackend()

    def check() -> float:
        for cache in caches:
            cache.tensor.zero_()
        found = ours.rope_and_store(qkv, norms, EPS, table, step, caches[0], 0)
        wanted = theirs.rope_and_store(qkv, norms, EPS, table, step, caches[1], 0)
        return max(difference(found, wanted), difference(caches[0].tensor, caches[1].tensor))

    return Case(
        kernel="rope and cache write",
        size=f"{rows} rows",
        run=lambda: ours.rope_and_store(qkv, norms, EPS, table, step, caches[0], 0),
        reference=lambda: theirs.rope_and_store(qkv, norms, EPS, table, step, caches[1], 0),
        check=check,
        allowed=shapes.allowed,
        moved_bytes=2 * rows * width * shapes.dtype.itemsize,
        operations=3 * rows * width,
    )


def sampling_cases(vocab: int, rows: int) -> Iterator[Case]:
    """Against numpy, bit for bit. Logits of a spread like a model's: most of the weight on a few hundred ids."""
    logits = (np.random.default_rng(1).standard_normal((rows, vocab)) * 3).astype(np.float32)
    asked = SamplingParams(max_tokens=1, temperature=0.0)
    ways = {
        "greedy": asked,
        "temperature 1": replace(asked, temperature=1.0),
        "temperature 1, top-p 0.9": replace(asked, temperature=1.0, top_p=0.9),
        "temperature 0.7, top-k 50, min-p 0.05": replace(asked, temperature=0.7, top_k=50, min_p=0.05),
        "greedy, 5 log-probabilities": replace(asked, logprobs=5),
    }
    for name, settings in ways.items():
        yield _sampling_case(name, settings, logits)


def _sampling_case(name: str, settings: SamplingParams, logits: np.ndarray) -> Case:
    draws = [Draw(settings, index) for index in range(len(logits))]
    ours, theirs = choose_sampler(), NumpySampler()
    return Case(
        kernel=f"sampling, {name}",
        size=f"{len(logits)} rows",
        run=lambda: ours.sample(logits, draws),
        reference=lambda: theirs.sample(logits, draws),
        check=lambda: float(ours.sample(logits, draws) != theirs.sample(logits, draws)),
        allowed=0.0,
        moved_bytes=logits.nbytes,
        operations=logits.size,
    )
