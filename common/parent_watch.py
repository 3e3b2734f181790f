"""Ends a process as soon as the one that started it is gone, however that one ended.

The launcher holds the write end of a pipe and never writes. When it goes, `kill -9` included, the system closes
that end and a read of the other one returns. The reading thread then leaves by `os._exit`: no handlers, no
waiting for a step that is still computing. Two workers orphaned with their gigabytes of cache would otherwise
hold the machine until somebody looked.

On Linux the kernel is asked for the same (PR_SET_PDEATHSIG): a process that is stopped runs no thread, and one in a
native call that keeps the interpreter runs no Python. Alone it would not do: it is not everywhere, says nothing when
the parent was gone before it was asked, and fires when the starting *thread* ends (the launcher's is its main one).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

ORPHANED = 1
"""Exit code of a process that lost its parent; nobody is left to read it but logs."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(read_fd: int | None) -> None:
    """Watches the pipe's read end from a daemon thread; `None`: started by hand, nobody to follow."""
    if read_fd is None:
        return
    os.set_inheritable(read_fd, False)  # a child of ours follows us, not our parent
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(read_fd,), name="parent-watch", daemon=True).start()


def _watch(read_fd: int) -> None:
    while os.read(read_fd, 1):
        pass
    os._exit(ORPHANED)
