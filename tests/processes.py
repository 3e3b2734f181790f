"""What tests ask about processes that are not their children."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """A zombie that its new parent has not taken back yet counts as dead: it holds nothing any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_of(pid: int) -> list[str]:
    """Its words; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []
