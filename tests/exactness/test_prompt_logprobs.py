"""Log-probabilities of prompts are the same bits on every path: chunks, company, pools, caches, preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.request import SamplingParams
from kernels.model import CausalModel
from tests.exactness.conftest import Oracle, greedy
from tests.exactness.real_cluster import Ask, Said, collocated, pools

LENGTHS = (1, 2, 17, 129, 150)


def scored(max_tokens: int = 2) -> SamplingParams:
    return replace(greedy(max_tokens), prompt_logprobs=5)


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[Ask]:
    return [Ask(tuple(text_ids[9 * i : 9 * i + length]), scored()) for i, length in enumerate(LENGTHS)]


def check(asks: list[Ask], found: list[Said], wanted: list[Said]) -> None:
    for ask, one, other in zip(asks, found, wanted, strict=True):
        where = f"prompt of {len(ask.prompt)} tokens"
        assert len(one.prompt) == len(ask.prompt) - 1, where
        assert one == other, where


def test_the_oracle_itself_says_something(prompts: list[Ask], oracle: Oracle) -> None:
    for ask, said in zip(prompts, oracle(prompts), strict=True):
        assert len(said.prompt) == len(ask.prompt) - 1 and said.end == "length"
        assert all(len(token.top) == 5 and token.chosen <= token.top[0][1] < 0 for token in said.prompt)
        # Text is not random: a model that reads it in the wrong place would say 10.8 bits of nothing.
        mean = -sum(token.chosen for token in said.prompt[16:]) / max(1, len(said.prompt[16:]))
        assert mean < 4.0, mean


@pytest.mark.parametrize("chunk", [32, 128, 512])
def test_both_pools_cold_then_warm(
    chunk: int, model: CausalModel, prompts: list[Ask], oracle: Oracle
) -> None:
    """Warm, the prefill worker computes all of it again, and the decode worker still needs no block."""
    if model.dtype is torch.float32 and chunk != 128:
        pytest.skip("chunks are the same code in both dtypes, and take three times as long in this one")
    cluster = pools(model, chunk=chunk)
    check(prompts, cluster.together(prompts), oracle(prompts))
    moved = cluster.counted("decode-0", "kv_transfer_bytes_total")
    again = prompts[2:4]
    check(again, cluster.together(again), oracle(again))
    assert cluster.counted("prefill-0", "prefix_cache_hits_total") == 0
    assert cluster.counted("decode-0", "kv_transfer_bytes_total") - moved < moved / 8


def test_collocated_cold_then_warm(model: CausalModel, prompts: list[Ask], oracle: Oracle) -> None:
    cluster = collocated(model, chunk=100)
    check(prompts, cluster.together(prompts), oracle(prompts))
    check(prompts[2:4], cluster.together(prompts[2:4]), oracle(prompts[2:4]))
    assert cluster.counted("decode-0", "prefix_cache_hits_total") == 0


def test_alone_through_both_pools(model: CausalModel, prompts: list[Ask], oracle: Oracle) -> None:
    some = prompts[1:4]
    check(some, pools(model, chunk=100, caching=False).alone(some), oracle(some))


def test_preempted_after_its_prompt_was_said(model: CausalModel, text_ids: list[int], oracle: Oracle) -> None:
    """Each takes two blocks to begin and four to end, of nine in all."""
    if model.dtype is torch.float32:
        pytest.skip("blocks move in the same way in both dtypes")
    asks = [Ask(tuple(text_ids[70 * i : 70 * i + 31]), scored(21)) for i in range(3)]
    cluster = pools(model, chunk=128, decode_blocks=9)
    check(asks, cluster.together(asks), oracle(asks))
    assert cluster.counted("decode-0", "num_preemptions_total") > 0
