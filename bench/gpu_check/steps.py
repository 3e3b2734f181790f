"""Whole steps of a model, from token ids to sampled tokens, over their roof: decode batches, a chunk; its products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu_check.driving import Batch, Joined, Sampling
from bench.gpu_check.findings import Finding, Speed
from bench.gpu_check.places import BLOCK_SIZE, Place
from bench.gpu_check.roofs import Roofs
from bench.gpu_check.weights import make_runner
from bench.model_costs import layer_weights, step_operations, weight_bytes
from kernels.linear import CUDA_TILE
from kernels.model import CausalModel
from kernels.runner import ModelRunner

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Sizes:
    batches: Sequence[int]
    context: int
    chunk: int


GPU_SIZES = Sizes((1, 16, 64), 1024, 2048)
CPU_SIZES = Sizes((1, 2), 20, 4)
TARGET_AT = 64, 1 / 1.4
"""Batch, and the share of its time that the roof may take at least."""


def speeds(name: str, model: CausalModel, place: Place, roofs: Roofs) -> Iterator[Finding]:
    """Graphs and eager, each with a pool of its own. What the pool holds does not matter, so long as it is finite."""
    sizes = GPU_SIZES if place.on_gpu else CPU_SIZES
    part = f"{name} model"
    length = max(sizes.context, sizes.chunk)
    eager_s: dict[int, float] = {}
    for eager in (True, False):
        runner = make_runner(
            model, max(sizes.batches) * -(-length // BLOCK_SIZE), max(sizes.batches), length, eager=eager
        )
        runner.cache.tensor.normal_()
        _join(runner, sizes, length)
        for rows in sizes.batches:
            batch = _batch(runner, rows, sizes.context - 1, 1)
            seconds = place.clock.wall_s(lambda r=runner, b=batch: r.run(b))  # type: ignore[misc]
            note = "" if eager else f"eager takes {eager_s[rows] / seconds:.2f} times as long"
            eager_s.setdefault(rows, seconds)
            yield roofs.speed(
                part,
                f"decode step, {rows} rows of {sizes.context} tokens, {'eager' if eager else 'graph'}",
                seconds,
                moved_bytes=weight_bytes(model.config, model.dtype) + rows * _kv_bytes(runner, sizes.context),
                target=TARGET_AT[1] if rows == TARGET_AT[0] and not eager else None,
                note=note,
            )
        if eager:
            yield _chunk(part, runner, sizes, place, roofs)
        del runner, batch
        place.tidy()
    yield from products(part, model, place, roofs, sizes.chunk)


def _kv_bytes(runner: ModelRunner, tokens: int) -> int:
    return tokens * runner.layout.block_bytes // BLOCK_SIZE


def _join(runner: ModelRunner, sizes: Sizes, length: int) -> None:
    """As many slots as the largest batch has, all of their blocks theirs from the begin."""
    width = -(-length // BLOCK_SIZE)
    order = torch.randperm(runner.cache.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    joined = [
        Joined(slot, [1] * length, 1, order[slot * width : (slot + 1) * width], GREEDY)
        for slot in range(max(sizes.batches))
    ]
    runner.run(Batch(joined=joined))


def _batch(runner: ModelRunner, rows: int, start: int, count: int) -> Batch:
    batch = Batch()
    ids = torch.randint(
        0, runner.vocab_size, (count,), generator=torch.Generator().manual_seed(start)
    ).tolist()
    for slot in range(rows):
        batch.add(slot, start, ids, True)
    return batch


def _chunk(part: str, runner: ModelRunner, sizes: Sizes, place: Place, roofs: Roofs) -> Speed:
    batch, config = _batch(runner, 1, 0, sizes.chunk), runner.model.config
    return roofs.speed(
        part,
        f"chunk step, {sizes.chunk} tokens on 0",
        place.clock.wall_s(lambda: runner.run(batch)),
        moved_bytes=weight_bytes(config, runner.model.dtype),
        operations=step_operations(config, 1, 0, sizes.chunk),
        roof="matrix",
    )


def products(part: str, model: CausalModel, place: Place, roofs: Roofs, tokens: int) -> Iterator[Speed]:
    """Of a layer's largest weight: in the tiles that the model takes, and in larger calls, with what that does to bits.
    What a larger call gains, and which sizes keep a row's bits, is what an own product would have to beat."""
    config = model.config
    out, inner = 2 * config.intermediate_size, config.hidden_size
    assert out * inner <= layer_weights(config)
    weight, x = place.random(out, inner).mul_(inner**-0.5), place.random(tokens, inner, seed=1)
    tile = CUDA_TILE.longest
    tiles = x.split(tile)

    def in_tiles() -> torch.Tensor:
        return torch.cat([F.linear(one, weight) for one in tiles])

    wanted = in_tiles()
    cost = partial(
        roofs.speed,
        part,
        moved_bytes=weight.numel() * weight.itemsize,
        operations=2 * tokens * out * inner,
        roof="matrix",
    )
    name = f"product {out}×{inner}"
    seconds = place.clock.device_s(in_tiles)
    yield cost(f"{name}, {tokens} rows in tiles of {tile}", seconds)
    for size in dict.fromkeys((min(256, tokens), tokens)):
        pieces = x.split(size)
        found = torch.cat([F.linear(one, weight) for one in pieces])
        others = int((found != wanted).any(1).sum())
        seconds = place.clock.device_s(
            lambda p=pieces: torch.cat([F.linear(one, weight) for one in p])  # type: ignore[misc]
        )
        note = f"{others} of {tokens} rows have other bits than in tiles"
        what = f"{name}, {tokens} rows in calls of {size}"
        yield cost(what, seconds, note=note)
