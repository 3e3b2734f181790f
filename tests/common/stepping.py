"""Requests, cores and results for tests of the two schedulers and workers: small, and without a model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bench.virtual_model import VirtualModel, continuation
from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.effects import Effect
from common.messages import Message, PeerAddress
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

BLOCK = 4
CHUNK = 16
FRONT = FrontId("front")
TARGET = PeerAddress(WorkerId("decode-0"), Incarnation(1), "d0", "d0")
OTHER_TARGET = PeerAddress(WorkerId("decode-1"), Incarnation(1), "d1", "d1")
COORDINATOR = WorkerId("coordinator")


def make_core(
    num_blocks: int = 64, *, max_num_seqs: int = 8, chunk: int = CHUNK, caching: bool = True
) -> BatchingCore:
    return BatchingCore(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        prefix_caching=caching,
        fingerprint="fp",
    )


def model_for(core: BatchingCore) -> VirtualModel:
    return VirtualModel(
        num_blocks=core.pool.total, block_size=core.block_size, max_num_seqs=core.max_num_seqs
    )


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def request(
    name: str,
    ids: Seq[int],
    max_tokens: int = 5,
    *,
    priority: int = 0,
    salt: str = "",
    end_ids: tuple[int, ...] = (),
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, end_token_ids=end_ids)
    return Request(RequestId(name), pack_ids(ids), sampling, FRONT, priority=priority, cache_salt=salt)


def attempt(number: int = 1) -> Attempt:
    return Attempt(number)


def expected(ids: list[int], count: int) -> list[int]:
    return continuation(ids, count)


def messages(effects: list[Effect]) -> list[Message]:
    """What the effects say, frames left out."""
    return [effect.message for effect in effects if hasattr(effect, "message")]


def check_whole(core: BatchingCore) -> None:
    """Nothing is held any more."""
    core.pool.check()
    assert core.pool.held == 0
    assert core.free_slots == core.max_num_seqs
    assert core.take_batch() is None


def run_step(model: VirtualModel, batch: Batch) -> list[RowResult]:
    return model.run(batch)
