"""Runs a plan against a service: each request at its time, never more at once than allowed, all of them to an end.

The next request is written out while the last one's time is awaited, so that what goes out is never late for being
made. What limits a run: each request has its timeout, so the last one ends that long after its start at the latest.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable

from bench.load.client import Client
from bench.load.records import Planned, Record, Run

PROGRESS_EVERY_S = 1.0
WATCH_EVERY_S = 0.02


class Runner:
    """`body` writes a request out, `tell` hears (sent, ended, tokens) once a second. `closed_for_s`: how long the users
    of a closed loop, whose plan has no times, go on sending."""

    def __init__(
        self,
        client: Client,
        body: Callable[[Planned], bytes],
        max_concurrency: int | None,
        tell: Callable[[int, int, int], None],
        closed_for_s: float | None = None,
    ) -> None:
        self._client = client
        self._body = body
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        self._tell = tell
        self._closed_for_s = float("inf") if closed_for_s is None else closed_for_s
        self._records: list[Record] = []
        self._tokens = 0
        self._running: set[asyncio.Task[None]] = set()
        self._stalls_s: list[float] = []
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Nothing more is sent, and what runs is broken off: by Ctrl-C."""
        self._stop.set()

    async def run(self, plan: Iterable[Planned]) -> Run:
        gc.collect()
        gc.freeze()  # a collection while answers come would look like the server's
        cpu_before_s, started_s = time.process_time(), time.perf_counter()
        sending = asyncio.create_task(self._send_all(plan, started_s))
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._watch_own_clock())
        while not sending.done() and not stopping.done():
            await asyncio.wait(
                (sending, stopping), timeout=PROGRESS_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            self._say()
        interrupted = stopping.done()
        for task in (sending, stopping, watching, *self._running):
            task.cancel()
        await asyncio.gather(sending, stopping, watching, *self._running, return_exceptions=True)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_before_s
        gc.unfreeze()
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error
        records = tuple(sorted(self._records, key=lambda record: record.index))
        return Run(records, wall_s, cpu_s, interrupted, tuple(self._stalls_s))

    async def _send_all(self, plan: Iterable[Planned], started_s: float) -> None:
        for planned in plan:
            request = self._body(planned)
            wait_s = started_s + planned.due_s - time.perf_counter()
            await asyncio.sleep(max(0.0, wait_s))  # 0 lets go out what was sent before
            if self._slots is not None:
                await self._slots.acquire()
            if time.perf_counter() - started_s >= self._closed_for_s:
                break
            task = asyncio.create_task(self._send(planned, request, started_s))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        while self._running:
            await asyncio.wait(self._running)

    async def _send(self, planned: Planned, request: bytes, started_s: float) -> None:
        try:
            record = await self._client.ask(planned, request, started_s)
            self._records.append(record)
            self._tokens += record.tokens
        finally:
            if self._slots is not None:
                self._slots.release()

    async def _watch_own_clock(self) -> None:
        while True:
            due_s = time.perf_counter() + WATCH_EVERY_S
            try:
                await asyncio.sleep(WATCH_EVERY_S)
            finally:
                self._stalls_s.append(max(0.0, time.perf_counter() - due_s))

    def _say(self) -> None:
        self._tell(len(self._records) + len(self._running), len(self._records), self._tokens)
