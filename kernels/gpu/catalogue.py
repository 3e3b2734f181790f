"""Every family of Triton kernels, each as calls of its wrappers at the shapes that models have: what is compiled ahead.

A call works on meta tensors: it allocates nothing and computes nothing. A family whose module is missing says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels.gpu.device_step import DeviceStep

META = torch.device("meta")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256)
FAMILIES = ("attention", "rope_store", "norms", "silu_mul", "block_moves", "sampling")
"""Modules of this package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`indexes_blocks`: kernels that take block numbers from an argument `tables`. `exact`: every operation is rounded
    once, none is fused or approximate. `invariant`: one class of matrix instructions, whatever the capability.
    `spill_bytes`: no more of them is right."""

    family: str
    label: str
    call: Callable[[], object]
    indexes_blocks: tuple[str, ...] = ()
    exact: bool = False
    invariant: bool = False
    spill_bytes: int = 0


def missing() -> list[str]:
    """Families that are not there yet."""
    return [family for family in FAMILIES if importlib.util.find_spec(f"kernels.gpu.{family}") is None]


def uncatalogued() -> list[str]:
    """Families that are there and have no entry."""
    return [family for family in FAMILIES if family not in missing() and family not in _ENTRIES]


def entries(whole: bool) -> Iterator[Entry]:
    """Of all that are there; without `whole` in bfloat16 and with one head size alone."""
    for family, make in _ENTRIES.items():
        if family not in missing():
            yield from make(importlib.import_module(f"kernels.gpu.{family}"), whole)


def meta_step(rows: int, count: int, end: int, block_size: int) -> DeviceStep:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=META)

    tokens = rows * count
    return DeviceStep(
        tables=ints(rows, -(-end // block_size)),
        starts=ints(rows),
        counts=ints(rows),
        firsts=ints(rows),
        token_rows=ints(tokens),
        positions=ints(tokens),
        max_count=count,
        max_end=end,
    )


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _dtypes(whole: bool) -> tuple[torch.dtype, ...]:
    return DTYPES if whole else (torch.bfloat16,)


def _heads_and_dtypes(whole: bool) -> Iterator[tuple[int, torch.dtype]]:
    yield from product(HEAD_DIMS, DTYPES) if whole else [(128, torch.bfloat16)]


def _attention(module: Any, whole: bool) -> Iterator[Entry]:
    """8 KV heads of 4 queries each; decode rows (split and merge), chunks, chunks in large tiles."""
    tuning = importlib.import_module("kernels.gpu.tuning")
    forms = (("decode", 64, 1, False), ("chunk", 1, 512, False), ("chunk fast", 1, 512, True))
    for (dim, dtype), (form, rows, count, fast) in product(_heads_and_dtypes(whole), forms):
        launch = tuning.attention_launch(dim, dtype, 8192, META)
        step = meta_step(rows, count, 8192, 16)
        q = _empty(rows * count, 32, dim, dtype=torch.float32)
        pool = _empty(4096, 32, 2, 8, 16, dim, dtype=dtype)
        yield Entry(
            "attention",
            f"{form}, head {dim}, {_name(dtype)}",
            partial(module.paged_attention, q, pool, 3, step, launch, fast=fast),
            indexes_blocks=("_decode_kernel", "_chunk_kernel"),
            invariant=not fast,
            # fp32 tiles of wide heads do not fit into registers, on no chip: right, slow, and nobody serves them so.
            spill_bytes=50_000 if dtype == torch.float32 else 64 if fast else 0,
        )


def _rope_store(module: Any, whole: bool) -> Iterator[Entry]:
    for dim, dtype in _heads_and_dtypes(whole):
        qkv, angles = _empty(64, 48 * dim, dtype=dtype), _empty(8192, dim // 2, dtype=torch.float32)
        pool, step = _empty(4096, 32, 2, 8, 16, dim, dtype=dtype), meta_step(64, 1, 8192, 16)
        norm = _empty(dim, dtype=torch.float32)
        for norms in (None, (norm, norm)):
            yield Entry(
                "rope_store",
                f"head {dim}, {_name(dtype)}{', normed' if norms else ''}",
                partial(module.rope_store, qkv, angles, angles, norms, 1e-5, pool, 3, step),
                indexes_blocks=("_rope_store_kernel",),
            )


def _norms(module: Any, whole: bool) -> Iterator[Entry]:
    for size, dtype in product((576, 4096, 8192) if whole else (4096,), _dtypes(whole)):
        x, weight = _empty(64, size, dtype=dtype), _empty(size, dtype=torch.float32)
        label = f"{size}, {_name(dtype)}"
        yield Entry("norms", label, partial(module.rms_norm, x, weight, 1e-5))
        yield Entry("norms", f"{label}, added", partial(module.add_rms_norm, x, x, weight, 1e-5))


def _silu_mul(module: Any, whole: bool) -> Iterator[Entry]:
    for dtype in _dtypes(whole):
        x = _empty(64, 2 * 14336, dtype=dtype)
        yield Entry("silu_mul", _name(dtype), partial(module.silu_mul, x))


def _sampling(module: Any, whole: bool) -> Iterator[Entry]:
    """Rows that draw and have penalties, and greedy ones. The table is laid out on the host, then is no memory."""
    sampling_table = importlib.import_module("kernels.gpu.sampling_table")
    words = torch.empty(4096, dtype=torch.int32, device=META)
    for vocab in (49_152, 128_256) if whole else (128_256,):
        for label, draws in (("greedy", False), ("drawn", True)):
            table = sampling_table.SamplingTable(
                words=words, num_rows=64, vocab_size=vocab, any_draws=draws, any_changes=draws
            )
            logits = _empty(64, vocab, dtype=torch.float32)
            call = partial(module.sample_on_device, logits, table)
            yield Entry("sampling", f"{label}, vocabulary {vocab}", call, exact=True)


def _block_moves(module: Any, whole: bool) -> Iterator[Entry]:
    """Blocks of 2 MB, and such that no vector load fits."""
    for block_bytes in (2 << 20, 1000) if whole else (2 << 20,):
        pool, staging = (_empty(n, block_bytes, dtype=torch.uint8) for n in (4096, 8))
        blocks, pairs = _empty(8, dtype=torch.int32), _empty(2, 8, dtype=torch.int32)
        calls = {
            "gather": partial(module.gather_blocks, pool, blocks, staging),
            "gather, hashed": partial(module.gather_hashed, pool, blocks, staging),
            "scatter": partial(module.scatter_blocks, staging, blocks, pool),
            "scatter, hashed": partial(module.scatter_hashed, staging, blocks, pool),
            "copy, hashed": partial(module.copy_hashed, pool, pool, pairs),
            "hash": partial(module.hash_blocks, pool, blocks),
        }
        for name, call in calls.items():
            label = f"{name}, {block_bytes} bytes"
            yield Entry("block_moves", label, call, indexes_blocks=("_move_kernel",))


_ENTRIES: dict[str, Callable[[Any, bool], Iterator[Entry]]] = {
    "attention": _attention,
    "rope_store": _rope_store,
    "norms": _norms,
    "silu_mul": _silu_mul,
    "sampling": _sampling,
    "block_moves": _block_moves,
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
