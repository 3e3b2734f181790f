"""Says that a worker of this machine has died as soon as the system knows it: no heartbeat need be missed first.

Where the worker is elsewhere, in another container too, or the system has no such thing, heartbeats have to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from common.messages import Register, Sender
from common.process_space import process_space
from common.request import Incarnation, WorkerId

READ_FIRST_S = 0.05
"""What a process said last lies in our sockets when its end is known, and is read first: a worker that leaves after a
drain has said of each request where it went."""

MAX_WATCHED = 512
"""A descriptor each. For more than these, heartbeats have to do."""

Life = tuple[WorkerId, Incarnation]


class ProcessWatch:
    """Use inside a running event loop. `died` hears of each life at most once."""

    def __init__(self, died: Callable[[WorkerId, Incarnation], None]) -> None:
        self._died = died
        self._space = process_space()
        self._watched: dict[Life, int] = {}  # → file descriptor of its process
        self._closed = False

    def watch(self, card: Register, sender: Sender) -> None:
        life = (WorkerId(sender.name), sender.incarnation)
        if life in self._watched or not self._space or card.process_space != self._space:
            return
        for earlier in [other for other in self._watched if other[0] == life[0]]:
            self._unwatch(earlier)  # whoever it is: that life is over for us
        if len(self._watched) >= MAX_WATCHED:
            return
        try:
            process = os.pidfd_open(card.pid)
        except (AttributeError, OSError, OverflowError):
            return
        self._watched[life] = process
        asyncio.get_running_loop().add_reader(process, self._ended, life)

    def close(self) -> None:
        self._closed = True
        for life in list(self._watched):
            self._unwatch(life)

    def _ended(self, life: Life) -> None:
        self._unwatch(life)
        asyncio.get_running_loop().call_later(READ_FIRST_S, self._say, life)

    def _say(self, life: Life) -> None:
        if not self._closed:
            self._died(*life)

    def _unwatch(self, life: Life) -> None:
        process = self._watched.pop(life)
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)
