"""Reads a PULL socket as its messages come, with no future and no task for each.

Why: a front hears of every step of every worker. Waiting for a message by `await` cost it as much as four tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from transfer.inbox import TURN_S, only


class Pull:
    """From now on `hear` gets the one frame of every message (of one that has more, nothing: see `only`). After TURN_S
    everybody else on the loop has a turn. It is told when a socket begins to have messages, not while it has some: so
    it reads until there are none. `end` it before the socket is closed."""

    def __init__(self, socket: zmq.asyncio.Socket, hear: Callable[[bytes], None]) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._read)
        self._loop.call_soon(self._read)  # what is there already will not be told

    def end(self) -> None:
        """Nothing is heard any more. Idempotent."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._file)

    def _read(self) -> None:
        more = True
        try:
            more = self._turn()
        finally:  # a fault in one message leaves nobody deaf to the next
            if more:
                self._loop.call_soon(self._read)

    def _turn(self) -> bool:
        """Whether there may be more."""
        until = time.monotonic() + TURN_S
        while not self._ended:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing is there, or it was closed
                return False
            self._hear(only(frames))
            if time.monotonic() >= until:
                return True
        return False
