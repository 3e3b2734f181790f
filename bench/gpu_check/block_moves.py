"""Blocks gathered, scattered, copied and hashed on the device: byte for byte, the host's hash, and their speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.gpu_check.findings import Check, Speed
from bench.gpu_check.places import BLOCK_SIZE, Place
from bench.gpu_check.roofs import Roofs
from kernels.block_hash import block_hash
from kernels.cache import CacheLayout
from kernels.gpu.block_moves import (
    copy_hashed,
    gather_blocks,
    gather_hashed,
    hash_blocks,
    scatter_blocks,
    scatter_hashed,
)

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]

PART = "block_moves"
POISON = 0xA5
CHOSEN = [5, 0, 3]


def checks(place: Place) -> Iterator[Check]:
    for block_bytes in (_block_bytes(place), 1000):  # of which no vector load fits all
        yield from _checked(place, block_bytes)


def _block_bytes(place: Place) -> int:
    config = place.shape
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    return CacheLayout(*heads, BLOCK_SIZE, place.dtype, token_major=True).block_bytes


def _bytes(place: Place, count: int, block_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(place.device).manual_seed(seed)
    shape = (count, block_bytes)
    return torch.randint(0, 256, shape, generator=generator, device=place.device, dtype=torch.uint8)


def _checked(place: Place, block_bytes: int) -> Iterator[Check]:
    """Blocks that are nobody's are 0xA5 before and after; numbers of no block are passed over."""

    def poisoned(count: int) -> torch.Tensor:
        return torch.full((count, block_bytes), POISON, dtype=torch.uint8, device=place.device)

    def numbers(*ids: int) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int32, device=place.device)

    pool, blocks = _bytes(place, 7, block_bytes), numbers(*CHOSEN, -1)
    held = pool[CHOSEN]
    hashes = [*block_hash(held.cpu().numpy()).tolist(), 0]
    left_alone = [block for block in range(7) if block not in CHOSEN]

    def other(found: torch.Tensor, wanted: torch.Tensor) -> int:
        return int((found != wanted).sum())

    gathered: dict[str, Move] = {"gather": gather_blocks, "gather, hashed": gather_hashed}
    for name, gather in gathered.items():
        out = poisoned(5)
        said = gather(pool, blocks, out)
        wrong = other(out[:3], held) + other(out[3:], poisoned(2))
        yield Check(PART, f"{name}, {block_bytes} bytes: bytes that are others", wrong, 0)
        if said is not None:
            yield _hashes(name, block_bytes, said, hashes)
    scattered: dict[str, Move] = {"scatter": scatter_blocks, "scatter, hashed": scatter_hashed}
    staging = torch.cat([held, poisoned(1)])
    for name, scatter in scattered.items():
        there = poisoned(7)
        said = scatter(staging, blocks, there)
        wrong = other(there[CHOSEN], held) + other(there[left_alone], poisoned(4))
        yield Check(PART, f"{name}, {block_bytes} bytes: bytes that are others", wrong, 0)
        if said is not None:
            yield _hashes(name, block_bytes, said, hashes)
    there = poisoned(4)
    said = copy_hashed(pool, there, torch.stack([numbers(*CHOSEN), numbers(2, 3, 0)]))
    wrong = other(there[[2, 3, 0]], held) + other(there[1], poisoned(1)[0])
    yield Check(PART, f"copy, {block_bytes} bytes: bytes that are others", wrong, 0)
    yield _hashes("copy", block_bytes, said, hashes[:3])
    yield _hashes("hash", block_bytes, hash_blocks(pool, blocks), hashes)
    alone = [hash_blocks(pool, numbers(block)) for block in CHOSEN]
    yield _hashes("hash, one at a time", block_bytes, torch.cat(alone), hashes[:3])


def _hashes(name: str, block_bytes: int, found: torch.Tensor, wanted: list[int]) -> Check:
    wrong = sum(ours != right for ours, right in zip(found.tolist(), wanted, strict=True))
    return Check(PART, f"{name}, {block_bytes} bytes: hashes that are not the host's", wrong, 0)


# ---------------------------------------------------------------- speed


def speeds(place: Place, roofs: Roofs) -> Iterator[Speed]:
    count, block_bytes = place.moved_blocks, _block_bytes(place)
    pool = _bytes(place, 2 * count, block_bytes)
    staging = torch.empty((count, block_bytes), dtype=torch.uint8, device=place.device)
    order = np.random.default_rng(0).permutation(2 * count).astype(np.int32)
    blocks = torch.from_numpy(order[:count].copy()).to(place.device)
    pairs = torch.from_numpy(order.reshape(2, count).copy()).to(place.device)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "gather": (lambda: gather_blocks(pool, blocks, staging), 2),
        "gather, hashed": (lambda: gather_hashed(pool, blocks, staging), 2),
        "scatter": (lambda: scatter_blocks(staging, blocks, pool), 2),
        "scatter, hashed": (lambda: scatter_hashed(staging, blocks, pool), 2),
        "copy, hashed": (lambda: copy_hashed(pool, pool, pairs), 2),
        "hash": (lambda: hash_blocks(pool, blocks), 1),
    }
    for name, (call, passes) in calls.items():
        yield roofs.speed(
            PART,
            f"{name}, {count} blocks of {block_bytes} bytes",
            place.clock.device_s(call),
            moved_bytes=passes * count * block_bytes,
            target=0.8,
        )
