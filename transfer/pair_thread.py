"""The one thread of one pair of workers that share a process group: it makes the group, waits in it and drops it.

    loop   start ──▶                        watch ──▶ heard: lost          close: no word comes from it any more
    thread   work: join, tell the loop, move what is queued until told to leave, drop the group ──▶ over

Why a thread: a call into gloo ends by its timeout and by nothing else (`process_group.py`). Nobody waits for it, save a
process that leaves: with a thread inside torch it could crash on its way out.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable

from transfer.channel import HUNG_UP
from transfer.process_group import MOVE_LIMIT_S
from transfer.rendezvous import hang_up

log = logging.getLogger(__name__)

OPEN_S = 2.5  # for all of the opening: under the time after which a silent way is made anew (links.py)
JOIN_S = MOVE_LIMIT_S + 2.0
_LONGEST_WHY = 200
_FROM_TORCH = re.compile(r"^\[[^\]]*\.cc:\d+\] ")


class PairThread:
    """`work` runs in it; whatever it raises goes to `lost` on the loop. Make and use it on the running event loop."""

    def __init__(self, name: str, work: Callable[[], None], lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._lost = lost
        self._watched: socket.socket | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Lost unless it is watched within OPEN_S, whatever the thread waits for then."""
        self._limit = self._loop.call_later(OPEN_S, self._said_lost, f"no answer within {OPEN_S:g} s")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.tell(self._said_lost, in_words(error))
        self.tell(self._over.set)

    def tell(self, what: Callable[..., None], *words: object) -> bool:
        """From the thread: `what` is called on the loop. False where there is none any more."""
        try:
            self._loop.call_soon_threadsafe(what, *words)
        except RuntimeError:
            log.debug("no loop runs: nobody hears of a group")
            return False
        return True

    def _said_lost(self, why: str) -> None:
        if not self.closed:
            self._lost(why)

    # ------------------------------------------------------------ on the loop

    def watch(self, watched: socket.socket) -> None:
        """Takes it over: its end is the pair's."""
        self._end_limit()
        watched.setblocking(False)
        self._watched = watched
        self._loop.add_reader(watched, self._heard)

    def _heard(self) -> None:
        assert self._watched is not None
        try:
            said = self._watched.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._said_lost("it speaks where nothing is to be said" if said else HUNG_UP)

    def close(self) -> None:
        """The peer hears it at once; the thread leaves when its call is over. Idempotent."""
        self.closed = True
        self._end_limit()
        if self._watched is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._watched)
            hang_up(self._watched)
            self._watched = None

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> None:
        """Until it has left."""
        await self._over.wait()


async def all_over(threads: Iterable[PairThread]) -> None:
    """All have been closed. JOIN_S at most: as long only where a peer is stopped, else they leave at once."""
    try:
        async with asyncio.timeout(JOIN_S):
            for thread in threads:
                await thread.wait()
    except TimeoutError:
        log.warning("a group's thread is still inside torch")


def in_words(error: Exception) -> str:
    """What torch says is long, and begins with a place in its sources."""
    said = _FROM_TORCH.sub("", str(error)).split("\n")[0].split(". ")[0]
    return said[:_LONGEST_WHY] or type(error).__name__
