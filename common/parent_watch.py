"""Ends a process as soon as the one that started it is gone, however that one ended.

The launcher holds the write end of a pipe and never writes. When it goes, `kill -9` included, the system closes
that end and a read of the other one returns. The reading thread then leaves by `os._exit`: no handlers, no
waiting for a step that is still computing. Two workers orphaned with their gigabytes of cache would otherwise
hold the machine until somebody looked.

Why not PR_SET_PDEATHSIG: it fires when the starting *thread* ends, and exists on Linux only.
"""

from __future__ import annotations

import os
import threading

ORPHANED = 1
"""Exit code of a process that lost its parent; nobody is left to read it but logs."""


def end_with_parent(read_fd: int | None) -> None:
    """Watches the pipe's read end from a daemon thread; `None`: started by hand, nobody to follow."""
    if read_fd is None:
        return
    os.set_inheritable(read_fd, False)  # a child of ours follows us, not our parent
    threading.Thread(target=_watch, args=(read_fd,), name="parent-watch", daemon=True).start()


def _watch(read_fd: int) -> None:
    while os.read(read_fd, 1):
        pass
    os._exit(ORPHANED)
