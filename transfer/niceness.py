"""How far this process stands behind others for the processor, as the system takes it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def stand_behind(nice: int) -> None:
    """From now on, for this thread and those that it starts. Where the system first shares a processor out between
    sessions (sched_autogroup), niceness counts only within one: then the session is told too, if it is this process's
    own, as that of each child of `kvferry serve` is; the shell's of one started by hand is left as it is."""
    if nice <= os.getpriority(os.PRIO_PROCESS, 0):
        return
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such file, or none that may be written
            AUTOGROUP.write_text(str(nice))
