"""A lock that is had in the order in which it was asked for, by the same thread as often as it likes.

Why not `threading.RLock`: who releases that and asks again at once has it again, for as long as it does not let go of
the interpreter in between. A loop with callback after callback had it up to 139 times while the model thread stood
there and wanted to decide its next step. With this one: once. It costs a microsecond more.
"""

from __future__ import annotations

import threading


class FairLock:
    """To be had by `with`. Who waits for the lock holds the place in front of it, so nobody overtakes."""

    def __init__(self) -> None:
        self._place_in_front = threading.Lock()
        self._lock = threading.Lock()
        self._owner = 0  # only its own thread ever finds itself here
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._place_in_front:
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            self._lock.release()
