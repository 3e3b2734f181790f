"""The thread that runs the model: step after step, and between two of them only what must be decided.

Why the thread decides itself (finish, then schedule) and does not ask the loop: with the loop, each step ended with
two hand-overs between threads, each with a wake-up and a wait for the interpreter, and the model stood still meanwhile.
What a step has to say is put aside and the loop told; it is encoded and sent while the next step computes.

The pure worker belongs to whoever holds `lock`: this thread between two steps, the loop in each of its callbacks. While
a step computes nobody holds it. What is put aside is carried out by the loop before anything that it says later, so
the order of all that is said is that in which it was decided.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from common.batching import Batch, RowResult
from common.effects import Effect
from transfer.pure_worker import PureWorker, Step


class Stepping:
    """`stepped` is called from the model thread after each step, without the lock."""

    def __init__(self, node: PureWorker, step: Step, stepped: Callable[[], None]) -> None:
        self._node = node
        self._step = step
        self._stepped = stepped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._said: list[Effect] = []
        self._fault: BaseException | None = None
        self._ended = False
        self.lock = threading.RLock()
        self.started: float | None = None
        """When the step that is out began; None while none is."""

    def begin(self, now: float) -> None:
        """Starts a step if none is out and there is something to run. With the lock."""
        if self.started is None and not self._ended:
            batch = self._node.schedule(now)
            if batch is not None:
                self.started = now
                self._thread.submit(self._run, batch)

    def take_said(self) -> list[Effect]:
        """What finished steps have to say. With the lock."""
        said, self._said = self._said, []
        return said

    def raise_fault(self) -> None:
        """Raises what a step raised, or the worker after it: we erred, and it is to be heard of."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def end(self) -> None:
        """No step begins any more. One that is out ends in its own time, for nobody."""
        self._ended = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ in the model thread

    def _run(self, first: Batch) -> None:
        batch: Batch | None = first
        while batch is not None and not self._ended:
            try:
                results, failed = self._step(batch)
                with self.lock:
                    batch = self._between(batch, results, failed)
            except BaseException as error:
                self._fault = error
                batch = self.started = None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._stepped()

    def _between(self, batch: Batch, results: Seq[RowResult], failed: dict[int, str]) -> Batch | None:
        """Takes in one step's results and decides the next one."""
        now = time.monotonic()
        assert self.started is not None
        step_s, self.started = now - self.started, None
        for index, reason in failed.items():
            self._said += self._node.fail_row(batch.rows[index], reason, now)
        self._said += self._node.finish(batch, results, step_s, now)
        following = None if self._ended else self._node.schedule(now)
        self.started = None if following is None else time.monotonic()
        return following
