"""The model thread: it goes on by itself, says in order what was decided, and what it raises is heard of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.virtual_model import continuation
from common.batching import Batch
from common.effects import Effect, ToCoordinator, ToFront
from common.messages import Ended, Started, Tokens
from common.request import Attempt, Key, RequestId, WorkerId
from tests.transfer.small_worker import LIMIT_S, SmallWorker, decode_of
from transfer.stepping import Stepping

A, B, C = ((RequestId(name), Attempt(1)) for name in "abc")


class Scene(SmallWorker):
    """Its loop is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = Stepping(self.node, self._step, self._heard)
        self.steps = 0
        self.heard = 0
        self.raises = False
        self.ends: list[tuple[Key, str, bool]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def _step(self, batch: Batch) -> Any:
        assert self.may_go_on.wait(LIMIT_S)
        self.steps += 1
        results = self.model.run(batch)
        if self.raises:
            raise RuntimeError("a fault of ours")
        return results, {}

    def _heard(self) -> None:
        self.heard += 1

    def give(self, name: str, max_tokens: int) -> None:
        self.give_all((name,), max_tokens)

    def give_all(self, names: Iterable[str], max_tokens: int) -> None:
        with self.stepping.lock:
            for name in names:
                self.node.handle(decode_of(name, max_tokens), WorkerId("c"), 0.0)
            self.stepping.begin(time.monotonic())

    def until(self, what: Any) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < end
            time.sleep(0.001)

    def said(self) -> list[Effect]:
        with self.stepping.lock:
            return self.stepping.take_said() + self.node.turn(time.monotonic())

    def ended(self) -> list[tuple[Key, str, bool]]:
        """Since it began, in order."""
        said = [effect.message for effect in self.said() if isinstance(effect, ToCoordinator)]
        self.ends += [(m.key, m.outcome, m.retryable) for m in said if isinstance(m, Ended)]
        return self.ends

    def comes_to(self, ends: list[tuple[Key, str, bool]]) -> None:
        """These ends, each once, and nothing is held any more."""
        self.until(lambda: self.node.idle and self.stepping.started is None)
        assert self.ended() == ends
        assert self.pool.held == 0
        self.pool.check()
        assert self.stepping.broken is None


def test_steps_follow_each_other_though_the_loop_does_nothing() -> None:
    scene = Scene()
    scene.give("a", 40)
    scene.until(lambda: scene.stepping.started is None)
    assert scene.steps == 40 and scene.node.idle and scene.pool.held == 0
    scene.until(lambda: scene.heard == 40)
    kinds = [type(e.message) for e in scene.said() if isinstance(e, (ToCoordinator, ToFront))]
    assert kinds == [Ended, Started, Tokens], "what a step decided, then what had piled up to be said"
    scene.stepping.end()


def test_nothing_is_decided_while_the_loop_holds_the_worker() -> None:
    scene = Scene()
    scene.may_go_on.clear()
    scene.give("a", 1000)
    with scene.stepping.lock:
        scene.may_go_on.set()
        time.sleep(0.05)
        assert scene.steps == 1 and scene.node.records.step_s == 0.0, "its result waits"
        scene.node.abort(A, "the client left", time.monotonic())
    scene.until(lambda: scene.stepping.started is None)
    assert scene.steps == 1 and scene.pool.held == 0, "the late result of what ended gave its blocks back"
    scene.stepping.end()


def test_a_step_is_out_until_it_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looked in between saw a worker that was idle and still held the blocks."""
    scene = Scene()
    finish, seen = scene.node.finish, []

    def looking(*given: Any) -> Any:
        seen.append(scene.stepping.started)
        return finish(*given)

    monkeypatch.setattr(scene.node, "finish", looking)
    scene.give("a", 3)
    scene.comes_to([(A, "finished", True)])
    assert len(seen) == 3 and None not in seen


def test_what_a_step_raises_ends_its_requests_and_the_next_ones_run(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.raises = True
    scene.give_all("ab", 3)
    scene.until(lambda: scene.heard == 1)
    assert "a fault of ours" in caplog.text
    ends = [(A, "failed", False), (B, "failed", False)]
    scene.comes_to(ends)
    scene.raises = False
    scene.give("c", 3)
    scene.comes_to([*ends, (C, "finished", True)])


@pytest.mark.parametrize("after", [False, True], ids=["at-once", "when-half-is-done"])
def test_a_result_that_cannot_be_taken_in_ends_the_requests_of_its_step_once(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """`finish` raised over it each time: it was begun again for ever, thousands of times a second."""
    scene = Scene()
    finish = scene.node.finish

    def bad(*given: Any) -> Any:
        if after:
            finish(*given)
        raise RuntimeError("over its result")

    monkeypatch.setattr(scene.node, "finish", bad)
    scene.give_all("abc", 50)
    scene.comes_to([(key, "failed", False) for key in (A, B, C)])
    assert scene.steps == 1
    assert scene.node.records.counters.values["internal_errors_total"] == 3


def test_raised_once_it_costs_that_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    finish, times = scene.node.finish, [1]

    def bad(*given: Any) -> Any:
        if times:
            raise RuntimeError(times.pop())
        return finish(*given)

    monkeypatch.setattr(scene.node, "finish", bad)
    scene.give("a", 50)
    scene.until(lambda: scene.node.idle)
    scene.give_all("bc", 5)
    scene.comes_to([(A, "failed", False), (B, "finished", True), (C, "finished", True)])


def test_over_one_row_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    say = scene.node.records.say_token

    def bad(seq: Any, *given: Any) -> None:
        if seq.key == B:
            raise RuntimeError("over its token")
        say(seq, *given)

    monkeypatch.setattr(scene.node.records, "say_token", bad)
    scene.give_all("abc", 5)
    scene.comes_to([(B, "failed", False), (A, "finished", True), (C, "finished", True)])


# ---------------------------------------------------------------- deciding the next step raises


def test_no_step_can_ever_be_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    def bad(now: float) -> Any:
        raise RuntimeError("over the next step")

    monkeypatch.setattr(scene.node, "schedule", bad)
    scene.give_all("ab", 5)
    scene.comes_to([(B, "failed", False), (A, "failed", False)])
    scene.give("c", 5)
    scene.comes_to([(B, "failed", False), (A, "failed", False), (C, "failed", False)])
    assert scene.steps == 0


@pytest.mark.parametrize("made", [False, True], ids=["being-made", "made"])
@pytest.mark.parametrize("step", [0, 3])
def test_the_newest_goes_where_the_next_step_cannot_be_decided_once(
    monkeypatch: pytest.MonkeyPatch, made: bool, step: int
) -> None:
    """What the runner was to hear of its slots it hears with the next batch (the virtual model looks)."""
    scene = Scene()
    core: Any = scene.node._core
    of = core.take_batch
    calls = [0]

    def bad() -> Any:
        calls[0] += 1
        if calls[0] == step + 1:
            if made:
                of()
            raise RuntimeError("over the next step")
        return of()

    monkeypatch.setattr(core, "take_batch", bad)
    scene.give_all("abc", 40)
    scene.comes_to([(C, "failed", False), (A, "finished", True), (B, "finished", True)])


def test_one_request_over_which_no_step_can_be_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and who came after it; who was there before goes on."""
    scene = Scene()
    core: Any = scene.node._core
    add_row = core.add_row

    def bad(seq: Any, count: int) -> None:
        if seq.key == B:
            raise RuntimeError("over its chunk")
        add_row(seq, count)

    monkeypatch.setattr(core, "add_row", bad)
    scene.give_all("abc", 40)
    scene.comes_to([(C, "failed", False), (B, "failed", False), (A, "finished", True)])


def test_a_worker_that_cannot_end_what_raised_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    worse = RuntimeError("over its end")

    def bad(*_: object) -> Any:
        raise worse

    monkeypatch.setattr(scene.node, "finish", bad)
    monkeypatch.setattr(scene.node, "_end", bad)
    scene.give("a", 50)
    scene.until(lambda: scene.heard == 1)
    assert scene.stepping.broken is not None and scene.steps == 1
    scene.give("b", 5)
    assert scene.stepping.started is None


def test_a_step_lasts_no_longer_because_the_loop_is_busy() -> None:
    scene = Scene()
    scene.may_go_on.clear()
    scene.give("a", 1)
    with scene.stepping.lock:
        scene.may_go_on.set()
        time.sleep(0.5)
    scene.until(lambda: scene.node.idle)
    assert 0.0 < scene.node.records.step_s < 0.4


def test_after_the_end_no_step_begins() -> None:
    scene = Scene()
    scene.may_go_on.clear()
    scene.give("a", 1000)
    scene.stepping.end()
    scene.may_go_on.set()
    scene.until(lambda: scene.stepping.started is None)
    scene.give("b", 5)
    time.sleep(0.02)
    assert scene.steps == 1


# --- two batches out ---


class Device(Scene):
    """Takes batches as a device does: they are put behind each other, and run while the host does something else."""

    def __init__(self) -> None:
        SmallWorker.__init__(self, max_inflight=2)
        self.stepping = Stepping(self.node, self._step, self._heard, self._launch)
        self.steps = self.heard = self.out = self.most_out = self.rows = 0
        self.raises = False
        self.raises_at: set[int] = set()
        self.ends = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._runs = ThreadPoolExecutor(1)

    def collect(self) -> list[Any]:
        return [effect.message for effect in self.said() if isinstance(effect, (ToCoordinator, ToFront))]

    def _launch(self, batch: Batch) -> Callable[[], Any]:
        self.out += 1
        self.rows += len(batch.rows)
        self.most_out = max(self.most_out, self.out)
        number = self.steps
        self.steps += 1
        running = self._runs.submit(self.model.run, batch)

        def wait() -> Any:
            assert self.may_go_on.wait(LIMIT_S)
            results = running.result(LIMIT_S)
            self.out -= 1
            if number in self.raises_at:
                raise RuntimeError("a fault of ours")
            return results, {}

        return wait


def test_a_step_is_put_behind_the_one_that_runs() -> None:
    device = Device()
    device.give_all("abc", 30)
    device.comes_to([(key, "finished", True) for key in (A, B, C)])
    assert device.most_out == 2 and device.steps == 30
    assert device.rows == 90 and device.out == 0, "no row for nothing: answers end by their length"
    device.stepping.end()


def test_the_device_has_its_next_step_before_the_host_has_seen_the_last() -> None:
    device = Device()
    device.give("a", 50)
    device.until(lambda: device.steps > 3)
    device.may_go_on.clear()
    device.until(lambda: device.out == 2)
    time.sleep(0.02)
    assert device.out == 2, "and no third one"
    device.may_go_on.set()
    device.comes_to([(A, "finished", True)])
    device.stepping.end()


def test_a_request_aborted_with_two_steps_out_gives_its_blocks_back_after_both() -> None:
    device = Device()
    device.give("a", 1000)
    device.until(lambda: device.steps > 5)
    device.may_go_on.clear()
    device.until(lambda: device.out == 2)
    with device.stepping.lock:
        [ended] = device.node.abort(A, "the client left", time.monotonic())
        assert isinstance(ended, ToCoordinator) and device.node.idle and device.pool.held > 0
    device.may_go_on.set()
    device.until(lambda: device.stepping.started is None)
    assert device.pool.held == 0 and device.out == 0
    device.give("b", 5)
    device.comes_to([(B, "finished", True)])
    device.stepping.end()


@pytest.mark.parametrize("at", [{0}, {7}, {7, 8}, {11}, {12}])
def test_steps_that_raise_cost_their_requests_and_nothing_else(at: set[int]) -> None:
    device = Device()
    device.raises_at = at
    device.give_all("ab", 12)
    fate = "finished" if at == {12} else "failed"
    device.comes_to([(A, fate, fate == "finished"), (B, fate, fate == "finished")])
    device.raises_at = set()
    device.give("c", 5)
    device.until(lambda: device.node.idle and device.stepping.started is None)
    assert device.ended()[-1] == (C, "finished", True) and device.pool.held == 0 and device.out == 0
    device.pool.check()
    device.stepping.end()


def test_a_second_step_that_cannot_be_decided_leaves_the_one_that_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    add_rows_ahead, times = device.node._core.add_rows_ahead, [1]

    def bad(*given: Any) -> Any:
        add_rows_ahead(*given)
        if times and device.steps > 6:
            times.pop()
            raise RuntimeError("over the second step")

    monkeypatch.setattr(device.node._core, "add_rows_ahead", bad)
    device.give_all("abc", 12)
    said = device.collect()
    device.until(lambda: device.node.idle and device.stepping.started is None)
    said += device.collect()
    ends = [(m.key, m.outcome) for m in said if isinstance(m, Ended)]
    assert ends == [(C, "failed"), (A, "finished"), (B, "finished")]
    for key in (A, B):
        ids = [
            i for m in said if isinstance(m, Tokens) for row in m.rows if row.id == key[0] for i in row.ids
        ]
        assert ids == continuation(list(range(20)), 12)
    assert device.pool.held == 0 and device.out == 0
    device.pool.check()
    device.stepping.end()
