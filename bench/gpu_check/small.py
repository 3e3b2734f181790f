"""Norms, SiLU's gate, and rope with the cache's write, on the device: against float64, bits alone, and their speed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from bench.gpu_check.attention import scattered_tables, step_of
from bench.gpu_check.errors import row_error, unequal, value_error
from bench.gpu_check.findings import Check, Speed
from bench.gpu_check.places import BLOCK_SIZE, Heads, Place
from bench.gpu_check.roofs import Roofs
from kernels.gpu.norms import add_rms_norm, rms_norm
from kernels.gpu.rope_store import rope_store
from kernels.gpu.silu_mul import silu_mul
from kernels.rope import make_rope_table, rotate

EPS = 1e-5
ROWS = 5
LAYER, LAYERS = 1, 2


def checks(place: Place) -> Iterator[Check]:
    yield from _norms(place)
    yield from _silu(place)
    for normed in (False, True):
        yield from _rope(place, normed)


def _allowed(place: Place, roundings: int) -> float:
    """Half a step each, and a quarter for a sum or an exponential in fp32, which is all where nothing is rounded."""
    if place.dtype == torch.float32:
        return 32 * place.eps
    return (roundings / 2 + 0.25) * place.eps


def _norms(place: Place) -> Iterator[Check]:
    size = place.shape.hidden_size
    x, residual = place.random(ROWS, size), place.random(ROWS, size, seed=1)
    weight = 1 + 0.1 * place.random(size, dtype=torch.float32, seed=2)

    def wanted(of: torch.Tensor) -> torch.Tensor:
        wide = of.double()
        return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    place.forget(ROWS, size)
    normed = rms_norm(x, weight, EPS)
    yield Check("norms", "norm: error", value_error(normed, wanted(x)), _allowed(place, 2))
    alone = [rms_norm(x[row : row + 1], weight, EPS)[0] for row in range(ROWS)]
    yield Check("norms", "norm: numbers that are others alone", unequal(torch.stack(alone), normed), 0)

    total = residual.clone()
    place.forget(ROWS, size)
    both = add_rms_norm(x, total, weight, EPS)
    sums = (x.float() + residual.float()).to(place.dtype)
    yield Check("norms", "added: sums that are others", unequal(total, sums), 0)
    yield Check("norms", "added: error", value_error(both, wanted(sums)), _allowed(place, 2))
    one = residual[2:3].clone()
    others = unequal(add_rms_norm(x[2:3], one, weight, EPS)[0], both[2]) + unequal(one[0], total[2])
    yield Check("norms", "added: numbers that are others alone", others, 0)


def _silu(place: Place) -> Iterator[Check]:
    size = place.shape.intermediate_size
    x = 3 * place.random(ROWS, 2 * size)
    gate, up = x.double().chunk(2, -1)
    place.forget(ROWS, size)
    out = silu_mul(x)
    wanted = gate * torch.sigmoid(gate) * up
    yield Check("silu_mul", "error", value_error(out, wanted), _allowed(place, 1))
    alone = [silu_mul(x[row : row + 1])[0] for row in range(ROWS)]
    yield Check("silu_mul", "numbers that are others alone", unequal(torch.stack(alone), out), 0)


def _rope(place: Place, normed: bool) -> Iterator[Check]:
    """Where nothing belongs nothing is written: the pool is NaN there before and after."""
    config = place.shape
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rows = ((30, 4), (0, 2), (99, 1))
    tables = scattered_tables([start + count for start, count in rows], BLOCK_SIZE)
    step = step_of(rows, tables, Heads(heads, kv_heads, dim, BLOCK_SIZE), place)
    table = make_rope_table(config, 128, place.device)
    shape = (int(tables.max()) + 1, LAYERS, 2, kv_heads, BLOCK_SIZE, dim)
    pool = torch.full(shape, math.nan, dtype=place.dtype, device=place.device)
    qkv = place.random(step.num_tokens, (heads + 2 * kv_heads) * dim)
    norms = None
    if normed:
        norms = (
            1 + 0.1 * place.random(dim, dtype=torch.float32, seed=3),
            1 + 0.1 * place.random(dim, dtype=torch.float32, seed=4),
        )
    place.forget(step.num_tokens, heads, dim, dtype=torch.float32)
    q = rope_store(qkv, table.cos, table.sin, norms, EPS, pool, LAYER, step)

    def turned(part: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            part = part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        positions = step.positions.long()
        return rotate(part, table.cos[positions].double(), table.sin[positions].double())

    whole = qkv.view(step.num_tokens, -1, dim).double()
    raw_q, raw_k, v = whole.split([heads, kv_heads, kv_heads], dim=1)
    blocks = step.tables[step.token_rows.long(), step.positions.long() // BLOCK_SIZE].long()
    offsets = step.positions.long() % BLOCK_SIZE
    k_there, v_there = (pool[:, LAYER, part][blocks, :, offsets] for part in (0, 1))
    name = "rope_store"
    how = ", normed" if normed else ""
    # fp32 inside; norms are rounded to the dtype twice on the way, as in the models' own code.
    allowed = 6 * place.eps if normed and place.dtype != torch.float32 else 2e-5
    yield Check(
        name,
        f"queries{how}: error over a row's mean",
        row_error(q, turned(raw_q, norms and norms[0])),
        allowed,
    )
    keys_allowed = allowed + 3 * place.eps
    error = row_error(k_there, turned(raw_k, norms and norms[1]))
    yield Check(name, f"keys{how}: error over a row's mean", error, keys_allowed)
    yield Check(name, f"values{how}: numbers that are others", unequal(v_there, v.to(place.dtype)), 0)
    expected = torch.zeros(shape, dtype=torch.bool, device=place.device)
    for part in (0, 1):
        expected[:, LAYER, part][blocks, :, offsets] = True
    written = float((pool.isfinite() != expected).sum())
    yield Check(name, f"numbers{how} written where none belongs, or not where one does", written, 0)


# ---------------------------------------------------------------- speed


def speeds(place: Place, roofs: Roofs) -> Iterator[Speed]:
    config, item = place.shape, place.dtype.itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    for tokens in place.tokens:
        what = f"{tokens} tokens"
        x, residual = place.random(tokens, hidden), place.random(tokens, hidden, seed=1)
        weight = torch.ones(hidden, device=place.device)
        seconds = place.clock.device_s(lambda x=x, w=weight: rms_norm(x, w, EPS))  # type: ignore[misc]
        yield roofs.speed("norms", f"norm, {what}", seconds, moved_bytes=2 * x.numel() * item)
        seconds = place.clock.device_s(
            lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, EPS)  # type: ignore[misc]
        )
        yield roofs.speed("norms", f"added, {what}", seconds, moved_bytes=4 * x.numel() * item)
        gate_up = place.random(tokens, 2 * inner)
        seconds = place.clock.device_s(lambda x=gate_up: silu_mul(x))  # type: ignore[misc]
        yield roofs.speed("silu_mul", what, seconds, moved_bytes=3 * tokens * inner * item)
        yield _rope_speed(place, roofs, tokens)


def _rope_speed(place: Place, roofs: Roofs, tokens: int) -> Speed:
    """Each token the tenth of a sequence of its own."""
    config = place.shape
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rows = ((9, 1),) * tokens
    tables = scattered_tables([10] * tokens, BLOCK_SIZE)
    step = step_of(rows, tables, Heads(heads, kv_heads, dim, BLOCK_SIZE), place)
    shape = (int(tables.max()) + 1, LAYERS, 2, kv_heads, BLOCK_SIZE, dim)
    pool = torch.zeros(shape, dtype=place.dtype, device=place.device)
    table = make_rope_table(config, 128, place.device)
    qkv = place.random(tokens, (heads + 2 * kv_heads) * dim)

    def call() -> object:
        return rope_store(qkv, table.cos, table.sin, None, EPS, pool, LAYER, step)

    item = place.dtype.itemsize
    read, written = heads + 2 * kv_heads, heads * 4 + 2 * kv_heads * item  # queries stay fp32
    moved = tokens * dim * (read * item + written)
    return roofs.speed("rope_store", f"{tokens} tokens", place.clock.device_s(call), moved_bytes=moved)
