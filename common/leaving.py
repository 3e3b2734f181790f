"""How a process that has closed what it had ends: at once.

The interpreter would take apart torch, its threads and every module first, half a second to a second for what the
system takes back in a hundredth; whoever pressed Ctrl-C, or restarts workers in turn, waits for that. Nothing of ours
is left to be done by then: sockets are closed, logs are flushed here, and memory, descriptors and threads are the
system's.

Who is told to leave while still starting has nothing to close yet, and goes in the same way.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone; the code is for somebody else
            if stream is not None:
                stream.flush()
    os._exit(code)


def leave_when_told(command: str) -> None:
    """From now on, and until the handlers of an event loop take over, SIGTERM and Ctrl-C are a clean stop."""

    def told(number: int, _: object) -> None:
        os.write(2, f"{command}: {signal.Signals(number).name} while starting: leaving\n".encode())
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
