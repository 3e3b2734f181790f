"""Whether anybody is at the other end of a connection that we made, by what libzmq says of it.

ZeroMQ hides a broken connection: it connects again, for ever, and what was said meanwhile waits. For a peer whose
process is gone, and whose next life has another address, that is a socket kept for nothing, and a wait without a limit.

    away ── hands were shaken ──▶ there ── the connection broke ──▶ away
    away for GONE_AFTER_S, or turned away REFUSALS times (nobody listens there) ──▶ gone: said once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

GONE_AFTER_S = 3.0
REFUSALS = 5  # libzmq tries again after 0.1 to 0.2 s
PRESENCE = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class Presence:
    """Of one connecting socket, from before it connects until `end`. Use inside a running event loop."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self.there = False
        self._gone = gone
        self._refusals = 0
        self._over = False  # it is going to be said
        self._limit = self._new_limit()

    def end(self) -> None:
        """When the socket is closed. Idempotent."""
        self._limit.cancel()

    def hear(self, event: int) -> None:
        if self._over:
            return  # hands that are shaken now do not take it back
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.there, self._refusals = True, 0
            self._limit.cancel()
        elif event == zmq.EVENT_DISCONNECTED:
            if self.there:
                self.there = False
                self._limit = self._new_limit()
        elif event == zmq.EVENT_CONNECT_RETRIED and not self.there:
            self._refusals += 1
            if self._refusals == REFUSALS:
                self.refused()

    def refused(self) -> None:
        """Nobody listens; or a socket beside this one was turned away for good, and this one alone is of no use. Soon
        and not now: most often it ends this very watch."""
        self._limit.cancel()
        self._over = True
        self._limit = asyncio.get_running_loop().call_later(0, self._gone)

    def _new_limit(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(GONE_AFTER_S, self._gone)
