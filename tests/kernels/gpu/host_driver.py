"""Builds the driver of `host_driver.c` and tells it of memory: what CUDA IPC's tests have in a device's place."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("host_driver.c")


def build(folder: Path) -> Path:
    """The library. Skips the test where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "libcuda-of-this-host.so"
    command = [compiler, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library


class HostMemory:
    """What the driver calls allocations, in this process."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.host_allocation.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self._library.host_free.argtypes = [ctypes.c_uint64]

    def add(self, base: int, size: int, fd: int, *, can_be_shared: bool = True) -> None:
        """`size` bytes from `base` on, which are those of `fd`."""
        self._library.host_allocation(base, size, fd, can_be_shared)

    def free(self, base: int) -> None:
        self._library.host_free(base)

    def contexts(self) -> int:
        """Held or current in this process."""
        found: int = self._library.host_contexts()
        return found
