"""What a worker's own bookkeeping costs a step: scheduled, taken in, said.

Production objects, and nothing computed: results are made before the clock starts. Processor time of this process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.effects import ToFront
from common.messages import Decode, Prefill, Sender, Tokens
from common.request import (
    Attempt,
    FrontId,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    pack_ids,
)
from common.wire import encode
from decode_node.worker import DecodeWorker
from prefill_node.worker import PrefillWorker
from transfer.isolating import Row
from transfer.receiver import TransferReceiver
from transfer.sender import TransferSender

BLOCK_SIZE = 16
BLOCK_BYTES = 368_640  # of the default model in bf16
PROMPT_TOKENS = 256
BATCH = 16
ME = Sender("bench", Incarnation(1))
FRONT = FrontId("front-0")


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Processor microseconds of one step with `running` sequences: the scheduler's two calls, all of the worker's, and
    writing the one message to the front."""

    running: int
    scheduler_us: float
    worker_us: float
    encode_us: float


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Processor microseconds of one step that computes a whole prompt, with `waiting` others in line: the prompt
    before it ends, the next one begins, another is taken in."""

    waiting: int
    worker_us: float


def least_us(times: int, rounds: int, run: Callable[[], object]) -> float:
    """Processor time of one `run`: of `rounds` means over `times` calls, the least."""
    gc.collect()
    gc.disable()
    try:
        best = float("inf")
        for _ in range(rounds):
            began = time.process_time_ns()
            for _ in range(times):
                run()
            best = min(best, (time.process_time_ns() - began) / times)
        return best / 1000
    finally:
        gc.enable()


def request(index: int, prompt_tokens: int, max_tokens: int) -> Request:
    name = RequestId(f"cmpl-{index:032x}")
    # Ids that no other request begins with: nothing is found in a prefix cache.
    ids = pack_ids(range(index * 7 % 40_000, index * 7 % 40_000 + prompt_tokens))
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, seed=index), FRONT)


def _core(num_seqs: int, blocks: int, budget: int) -> BatchingCore:
    return BatchingCore(
        BlockPool(blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=True,
        fingerprint="bench",
    )


def results_of(batch: Batch) -> list[RowResult]:
    return [Row((7,), None) if sampled else Row((), None) for sampled in batch.samples]


# ---------------------------------------------------------------- decode


def decode_cost(running: int, *, rounds: int = 12) -> DecodeCost:
    """A round is as many steps as a block has tokens, so that each has its share of blocks that fill up."""
    times = BLOCK_SIZE
    steps = 2 * times * rounds + 64
    room = running * (steps // BLOCK_SIZE + 4)
    core = _core(running, room, 64 * running)
    receiver = TransferReceiver(block_bytes=BLOCK_BYTES)
    worker = DecodeWorker(core, receiver, fingerprint="f", block_bytes=BLOCK_BYTES, max_waiting=running)
    for index in range(running):
        asked = request(index, 20, steps)
        worker.handle(Decode(asked.request_id, Attempt(1), asked, b""), WorkerId("c"), 0.0)
    now = 0.0

    def step() -> list[Tokens]:
        nonlocal now
        now += 0.01
        batch = worker.schedule(now)
        assert batch is not None
        effects = worker.finish(batch, results, 0.01, now) + worker.turn(now)
        said = [effect.message for effect in effects if isinstance(effect, ToFront)]
        return [message for message in said if isinstance(message, Tokens)]

    results: list[RowResult] = []
    first = worker.schedule(now)
    assert first is not None and len(first.rows) == running
    worker.finish(first, results_of(first), 0.01, now)
    worker.turn(now)
    results = [Row((7,), None)] * running
    messages = step()  # more than one where their rows are too many for one
    assert sum(len(message.rows) for message in messages) == running
    worker_us = least_us(times, rounds, step)
    encode_us = least_us(times, rounds, lambda: [encode(message, ME) for message in messages])
    scheduler = worker._scheduler

    def schedule_alone() -> None:
        batch = scheduler.schedule(now)
        assert batch is not None
        scheduler.finish(batch, results, now)

    return DecodeCost(running, least_us(times, rounds, schedule_alone), worker_us, encode_us)


# ---------------------------------------------------------------- prefill


def prefill_cost(waiting: int, *, times: int = 50, rounds: int = 7) -> PrefillCost:
    """Prompts whose first token is their last: no transfer, which `overhead_transfer.py` looks at."""
    core = _core(BATCH, (waiting + 4) * PROMPT_TOKENS // BLOCK_SIZE, PROMPT_TOKENS)
    sender = TransferSender(block_bytes=BLOCK_BYTES)
    worker = PrefillWorker(core, sender, fingerprint="f", block_bytes=BLOCK_BYTES, max_waiting=waiting + 2)
    now, count = 0.0, 0

    def take_one() -> None:
        nonlocal count
        count += 1
        asked = request(count, PROMPT_TOKENS, 1)
        worker.handle(Prefill(asked.request_id, Attempt(1), asked, b"", None), WorkerId("c"), now)

    def step() -> None:
        nonlocal now
        now += 0.1
        batch = worker.schedule(now)
        assert batch is not None and batch.num_tokens == PROMPT_TOKENS
        worker.finish(batch, results_of(batch), 0.1, now)
        worker.turn(now)
        take_one()

    for _ in range(waiting + 1):
        take_one()
    return PrefillCost(waiting, least_us(times, rounds, step))
