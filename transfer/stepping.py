"""The thread that runs the model: step after step, and between two of them only what must be decided.

Why the thread decides itself (finish, then schedule) and does not ask the loop: with the loop, each step ended with
two hand-overs between threads, each with a wake-up and a wait for the interpreter, and the model stood still meanwhile.
What a step has to say is put aside and the loop told; it is encoded and sent while the next step computes.

The pure worker belongs to whoever holds `lock`: this thread between two steps, the loop in each of its callbacks. While
a step computes nobody holds it. What is put aside is carried out by the loop before anything that it says later, so
the order of all that is said is that in which it was decided.

What raises here is our own fault, and costs requests, never the worker: those of the step, where the step or taking it
in raised; where deciding the next one did, the newest, one after the other, until it can be decided (until that one
came, it could). Each of them ends, for good: tried again here it would raise again, for ever. A worker that cannot even
end them is `broken`.

A device need not stand still in between either: with `launch`, the next step is decided and put behind the one that
runs, as far as it can be decided before that one's tokens are seen, and only then is that one waited for. What such a
step computed for an answer that had ended comes to nothing, and so do the rows of a step whose predecessor raised.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from common.batching import Batch
from common.effects import Effect
from common.request import Key
from transfer.fair_lock import FairLock
from transfer.pure_worker import Launch, PureWorker, Results, Step

log = logging.getLogger(__name__)

Computed = Results | BaseException
"""What a step came to: results and the rows that have none, or what it raised."""


class Stepping:
    """`stepped` is called from the model thread after each step, without the lock."""

    def __init__(
        self, node: PureWorker, step: Step, stepped: Callable[[], None], launch: Launch | None = None
    ) -> None:
        """With `launch` no step is run by `step`, and `node` may have two batches out."""
        self._node = node
        self._step = step
        self._launch = launch
        self._stepped = stepped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._said: list[Effect] = []
        self._ended = False
        self.lock = FairLock()
        self.started: float | None = None
        """When the step that is out began; None once the last one is taken in, whoever looks."""
        self.broken: BaseException | None = None
        """Why no step begins any more, and never will."""

    def begin(self, now: float) -> None:
        """Starts a step if none is out and there is something to run. With the lock."""
        if self.started is None and not self._ended:
            batch = self._decide(now)
            if batch is not None:
                self.started = now
                self._thread.submit(self._run, batch)

    def take_said(self) -> list[Effect]:
        """What finished steps have to say. With the lock."""
        said, self._said = self._said, []
        return said

    def end(self) -> None:
        """No step begins any more. One that is out ends in its own time, for nobody."""
        self._ended = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ in the model thread

    def _run(self, first: Batch) -> None:
        if self._launch is not None:
            self._run_ahead(first, self._launch)
            return
        batch: Batch | None = first
        while batch is not None and not self._ended:
            began = time.monotonic()
            computed = self._compute(batch)
            step_s = time.monotonic() - began  # before the wait for the lock
            with self.lock:
                batch = self._between(batch, computed, step_s)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._stepped()

    def _run_ahead(self, first: Batch, launch: Launch) -> None:
        batch: Batch | None = first
        coming = _launched(first, launch)
        while batch is not None and not self._ended:
            began = time.monotonic()
            with self.lock:
                following = self._decide(began)
            beside = None if following is None else _launched(following, launch)
            computed = _waited(coming)
            step_s = time.monotonic() - began
            with self.lock:
                batch = self._between(batch, computed, step_s, following)
            if batch is not None:
                coming = _launched(batch, launch) if beside is None else beside
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._stepped()

    def _compute(self, batch: Batch) -> Computed:
        try:
            return self._step(batch)
        except BaseException as error:
            return error

    def _between(
        self, batch: Batch, computed: Computed, step_s: float, following: Batch | None = None
    ) -> Batch | None:
        """Takes in what one step came to and decides the next one, unless it is under way already."""
        now = time.monotonic()
        try:
            self._take_in(batch, computed, step_s, now)
        except BaseException as error:
            self._lose(batch, error, now)
        if following is None and not self._ended:
            following = self._decide(now)
        self.started = None if following is None else time.monotonic()
        return following

    def _take_in(self, batch: Batch, computed: Computed, step_s: float, now: float) -> None:
        if isinstance(computed, BaseException):
            raise computed
        results, failed = computed
        for index, reason in failed.items():
            self._said += self._node.fail_row(batch.rows[index], reason, now)
        self._said += self._node.finish(batch, results, step_s, now)

    # ------------------------------------------------------------ when we err

    def _decide(self, now: float) -> Batch | None:
        """The next step. With the lock."""
        newest_last: list[Key] | None = None
        while not self._ended:
            try:
                return self._node.schedule(now)
            except Exception as error:
                log.exception("the next step could not be decided")
                self._node.unmake()
                if newest_last is None:
                    newest_last = self._node.live_keys()
                self._fail(newest_last[-1:], error, now)
                if not newest_last:
                    return None
                newest_last.pop()
        return None

    def _lose(self, batch: Batch, error: BaseException, now: float) -> None:
        log.error("a step of %d rows is lost", len(batch.rows), exc_info=error)
        self._fail([seq.key for seq in batch.rows if not seq.over], error, now)
        self._node.abandon(batch)

    def _fail(self, keys: Seq[Key], error: BaseException, now: float) -> None:
        if not keys:
            self._node.records.counters.add("internal_errors_total")
        for key in keys:
            try:
                self._said += self._node.fail(key, error, now)
            except Exception as worse:
                log.exception("request %s cannot even be ended: no step begins any more", key[0])
                self.broken, self._ended = worse, True


def _launched(batch: Batch, launch: Launch) -> Callable[[], Results] | BaseException:
    try:
        return launch(batch)
    except BaseException as error:
        return error


def _waited(coming: Callable[[], Results] | BaseException) -> Computed:
    try:
        return coming if isinstance(coming, BaseException) else coming()
    except BaseException as error:
        return error
