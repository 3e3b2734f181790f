"""A process that leaves says its code, whatever became of who read its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LEAVES = (
    "import sys; from common.leaving import leave; sys.stdout and sys.stdout.write('last words'); leave(3)"
)


def test_what_was_said_last_is_written() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"last words", b"")


@pytest.mark.parametrize("closed", [False, True], ids=["nobody reads", "closed"])
def test_who_reads_nothing_changes_nothing(closed: bool) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", LEAVES]
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONUNBUFFERED"}
    if closed:
        command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    try:
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=environment, check=False)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (3, b"")
