"""Where a run took place: machine, versions, revision. For the record beside its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from common.version import VERSION

LIBRARIES = ("torch", "numpy", "uvloop", "httptools", "uvicorn", "pyzmq", "matplotlib")
GIT_LIMIT_S = 5.0


def surroundings() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvferry": VERSION,
        "revision": _revision(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _revision() -> str:
    """Of this clone, with a + where files were changed; "" where it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
