"""Where this process's id means this process: one running kernel, and one space of process ids on it.

A host's name does not say it. Containers of one machine may share a name and number their processes apart; two
machines made from one image may share a name too.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SPACE = "/proc/self/ns/pid"


def process_space() -> str:
    """Equal in two processes only if each can name the other by its process id; "" where the system cannot say."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_SPACE)}"
    except OSError:
        return ""
