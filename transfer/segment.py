"""A KV pool in memory that other processes may map and read: a sealed memfd, and what a reader asks of one.

Why a memfd and not a file in /dev/shm: it has no name, so nothing is left behind however its owner dies, SIGKILL
included; only who is handed the descriptor gets at it; and the size of /dev/shm (64 MB in a container) is no limit.

Why sealed: F_SEAL_FUTURE_WRITE, set once the owner has its own mapping, makes that mapping the only writable one
there will ever be, so that only its owner writes a pool is a rule of the kernel and not of ours. F_SEAL_SHRINK keeps
the size: reading past the end of a file that was cut ends a process by SIGBUS, and a reader must not depend on
its peer for its life.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

_NAME = "kvferry-pool"  # in /proc/PID/maps, for people who look
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl has no name for it before 3.13
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


class CannotMap(Exception):
    """A pool that this process will not or cannot take into view; the message says why."""


class PoolSegment:
    """The owner's end. Nothing is made before `allocate`: a pool that lives on a device never asks for it."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.size = 0
        self.fault = "the pool is not in this host's memory"

    def allocate(self, num_bytes: int) -> mmap.mmap | None:
        """Memory for the pool, or None where the system has none of this kind; `fault` then says why."""
        if not hasattr(os, "memfd_create"):
            self.fault = "this system has no memfd"
            return None
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            self.fault = f"no memfd: {error.strerror}"
            return None
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
            with suppress(
                OSError
            ):  # huge pages where the system lets shared memory have them (shmem_enabled)
                memory.madvise(mmap.MADV_HUGEPAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            self.fault = f"no sealed memfd: {error.strerror}"
            return None
        self.fd, self.size, self.fault = fd, num_bytes, ""
        return memory

    def close(self) -> None:
        """The descriptor goes; the pool stays for whoever has it mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def map_to_read(fd: int, size: int) -> mmap.mmap:
    """Maps another process's segment of `size` bytes; `fd` stays the caller's. Raises CannotMap."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS:
            raise CannotMap("its pool is not sealed")
        found = os.fstat(fd).st_size
        if found != size:
            raise CannotMap(f"its pool has {found} bytes, not {size}")
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise CannotMap(f"its pool cannot be mapped: {error}") from error
