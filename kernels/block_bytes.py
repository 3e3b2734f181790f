"""Copies and hashes the bytes of blocks, several in one call: in C and free of the GIL, or by the xxhash package.

The checksum is XXH3-64 with seed 0. It is always that of the copy: the source may be another process's memory, and
change between two looks. The C code (kernels/native/xxh3.c) loads every byte once, and stores and hashes what it
loaded; the package hashes what was stored. No torch here: whoever moves blocks need not compute.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import xxhash


def _extension() -> ModuleType | None:
    try:
        return importlib.import_module("kernels._native")
    except ImportError:
        return None


_native = _extension()


def checksums(sources: Sequence[bytes | memoryview]) -> Sequence[int]:
    """Of each."""
    if _native is not None:
        found: Sequence[int] = _native.blocks_checksums(sources)
        return found
    return [xxhash.xxh3_64_intdigest(source) for source in sources]


def copy_blocks(targets: Sequence[memoryview], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
    """Copies each source into the target beside it, one after the other; the checksums of the copies.

    Raises ValueError where the lengths differ; the blocks before may then have been written.
    """
    if _native is not None:
        found: Sequence[int] = _native.blocks_copy(targets, sources)
        return found
    for target, source in zip(targets, sources, strict=True):
        target[:] = source
    return checksums(targets)
