"""The model thread: it goes on by itself, says in order what was decided, and what it raises is heard of."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from bench.virtual_model import VirtualModel
from common.batching import Batch, BatchingCore
from common.blocks import BlockPool
from common.effects import Effect, ToCoordinator, ToFront
from common.messages import Decode, Ended, Started, Tokens
from common.request import Attempt, FrontId, Request, RequestId, SamplingParams, WorkerId, pack_ids
from decode_node.worker import DecodeWorker
from transfer.receiver import TransferReceiver
from transfer.stepping import Stepping

LIMIT_S = 5.0
A = (RequestId("a"), Attempt(1))


class Scene:
    """A decode worker of four slots, whose loop is the test."""

    def __init__(self) -> None:
        core = BatchingCore(
            BlockPool(256),
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefix_caching=False,
            fingerprint="f",
        )
        self.pool = core.pool
        self.model = VirtualModel(num_blocks=256, block_size=16, max_num_seqs=4)
        self.node = DecodeWorker(core, TransferReceiver(block_bytes=100), fingerprint="f", block_bytes=100)
        self.stepping = Stepping(self.node, self._step, self._heard)
        self.steps = 0
        self.heard = 0
        self.raises = False
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
        asked = Request(
            RequestId(name), pack_ids(range(20)), SamplingParams(max_tokens=max_tokens), FrontId("f")
        )
        with self.stepping.lock:
            self.node.handle(Decode(asked.request_id, Attempt(1), asked, b""), WorkerId("c"), 0.0)
            self.stepping.begin(time.monotonic())

    def until(self, what: Any) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < end
            time.sleep(0.001)

    def said(self) -> list[Effect]:
        with self.stepping.lock:
            return self.stepping.take_said() + self.node.turn(time.monotonic())


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


def test_what_a_step_raises_is_heard_of_once_and_the_next_one_runs() -> None:
    scene = Scene()
    scene.raises = True
    scene.give("a", 3)
    scene.until(lambda: scene.heard == 1)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        scene.stepping.raise_fault()
    scene.stepping.raise_fault()
    scene.raises = False
    scene.give("b", 3)
    scene.until(lambda: scene.node.idle and scene.pool.held == 0)
    scene.stepping.end()


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
