"""The watch itself; with a real launcher around it: tests/coordinator/test_supervisor.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from common.parent_watch import ORPHANED
from tests.processes import alive

# Computes without a pause and ignores what can be ignored, as a worker in a long step would.
BUSY = """
import signal, sys
from common.parent_watch import end_with_parent
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
end_with_parent(int(sys.argv[1]))
print("up", flush=True)
while True:
    pass
"""


def test_BR_041_a_busy_process_leaves_when_the_pipe_closes_and_not_before() -> None:
    read_fd, write_fd = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(read_fd)], pass_fds=(read_fd,), stdout=subprocess.PIPE, text=True
    )
    try:
        os.close(read_fd)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        time.sleep(0.3)
        assert child.poll() is None
        os.close(write_fd)
        assert child.wait(timeout=5) == ORPHANED
    finally:
        child.kill()
        child.communicate()


STOPPED = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\\n"
child.send_signal(signal.SIGSTOP)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what runs no thread is ended by Linux alone")
def test_BR_041_a_stopped_process_goes_with_its_parent_too() -> None:
    """It reads no pipe: the kernel ends it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED, BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
    finally:
        parent.kill()
        parent.communicate()
    deadline_s = time.monotonic() + 5
    while alive(child):
        assert time.monotonic() < deadline_s, "a stopped child outlived its parent"
        time.sleep(0.01)


def test_started_by_hand_nobody_is_watched() -> None:
    script = "from common.parent_watch import end_with_parent; import threading; end_with_parent(None); "
    script += "print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"1\n"
