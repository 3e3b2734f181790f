"""What a sequence owes of its prompt, and how far a cached prefix may be used meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.virtual_model import NO_TOKEN
from common.batching import BatchingCore
from common.lifecycle import Phase
from common.request import pack_ids
from common.sequence import Sequence
from tests.common.stepping import BLOCK, attempt, make_core, prompt, request


def scored_sequence(length: int, outputs: tuple[int, ...] = ()) -> Sequence:
    plain = request("r", prompt(length))
    asked = replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0))
    return Sequence(asked, attempt(), pack_ids(outputs), 1, Phase.QUEUED, 0.0)


def test_what_is_owed() -> None:
    assert scored_sequence(2).owes_scores
    assert not scored_sequence(1).owes_scores, "the first token has no log-probability"
    assert not scored_sequence(9, (7,)).owes_scores, "the front had the prompt's before it took an output"
    assert not Sequence(request("r", prompt(9)), attempt(), b"", 1, Phase.QUEUED, 0.0).owes_scores


@pytest.mark.parametrize(("said", "blocks"), [(1, 0), (4, 0), (5, 1), (9, 2), (15, 3), (16, 3)])
def test_hits_end_before_what_is_owed(said: int, blocks: int) -> None:
    """Token n's log-probability comes from computing token n - 1. With 16 of 16 said, hits end where they always do."""
    core = core_with_cached(16)
    seq = scored_sequence(16)
    seq.scored = said
    assert core.reserve(seq, num_tokens=16, usable_hits=15)
    assert seq.num_computed == seq.cached_tokens == blocks * BLOCK
    core.free(seq)
    core.pool.check()


def core_with_cached(length: int) -> BatchingCore:
    core = make_core()
    first = Sequence(request("first", prompt(length)), attempt(), b"", 1, Phase.QUEUED, 0.0)
    assert core.reserve(first, num_tokens=length, usable_hits=0)
    core.place(first)
    core.add_row(first, length)
    batch = core.take_batch()
    assert batch is not None
    core.take_back(batch, [NO_TOKEN])
    core.free(first)
    return core


@pytest.mark.parametrize(("evicted", "blocks"), [(0, 0), (1, 1), (2, 2)])
def test_BR_063_hits_are_the_contiguous_beginning_only(evicted: int, blocks: int) -> None:
    """Three blocks are cached, one of them is taken for something else: what lies behind it is of no use."""
    core = core_with_cached(3 * BLOCK + 1)
    cached = core.pool.match(
        core.hash_prompt(Sequence(request("r", prompt(13)), attempt(), b"", 1, Phase.QUEUED, 0.0))
    )
    assert len(cached) == 3
    others = [block for index, block in enumerate(cached) if index != evicted]
    core.pool.acquire(others)
    filled = core.pool.allocate(core.pool.available)
    assert filled is not None and cached[evicted] in filled
    core.pool.release(filled)
    core.pool.release(others)
    seq = Sequence(request("again", prompt(13)), attempt(), b"", 2, Phase.QUEUED, 0.0)
    assert core.reserve(seq, num_tokens=13, usable_hits=12)
    assert seq.cached_tokens == seq.num_computed == blocks * BLOCK
    assert not set(seq.blocks[blocks:]) & set(cached[:blocks])
    core.free(seq)
    core.pool.check()


def test_whoever_stands_in_a_batch_that_cannot_be_taken_back_still_gives_its_blocks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core()
    seqs = [Sequence(request(name, prompt(8)), attempt(), b"", 1, Phase.QUEUED, 0.0) for name in "abc"]
    for seq in seqs:
        assert core.reserve(seq, num_tokens=8, usable_hits=0)
        core.place(seq)
        core.add_row(seq, 4)
    batch = core.take_batch()
    assert batch is not None and core.num_out == 1

    def raises(seq: Sequence) -> None:
        raise RuntimeError("over the second")

    seqs[0].over = seqs[2].over = True
    monkeypatch.setattr(core, "publish", raises)
    with pytest.raises(RuntimeError, match="the second"):
        core.take_back(batch, [NO_TOKEN] * 3)
    seqs[1].over = True
    core.free(seqs[1])
    core.abandon(batch)
    assert core.num_out == 0 and core.pool.held == 0 and not any(seq.in_batch for seq in seqs)
    core.pool.check()
