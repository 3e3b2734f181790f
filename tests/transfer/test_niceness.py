"""A process that stands behind others, with its session or without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from transfer.niceness import AUTOGROUP

TOLD = """
import os
from pathlib import Path
from transfer.niceness import AUTOGROUP, stand_behind
stand_behind(7)
stand_behind(3)
session = (AUTOGROUP.exists() and AUTOGROUP.read_text().split() or ["none"])[-1]
print(os.getpriority(os.PRIO_PROCESS, 0), session)
"""


def told(*, own_session: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TOLD],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=own_session,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_process_of_its_own_session_takes_that_with_it() -> None:
    before = ((AUTOGROUP.exists() and AUTOGROUP.read_text().split()) or ["none"])[-1]
    assert told(own_session=False) == ["7", before], "the session is not its own"
    nice, session = told(own_session=True)
    assert nice == "7", "and never less than it was"
    if session == "none":
        pytest.skip("no autogroups here")
    assert session == "7"
