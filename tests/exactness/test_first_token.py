"""The first token comes from the prefill worker: it obeys every field of sampling, and has its log-probability."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from common.request import SamplingParams
from kernels.model import CausalModel
from tests.exactness.conftest import Oracle
from tests.exactness.real_cluster import Ask, pools

SEEDS = 200


def test_BR_075_the_first_token_is_drawn_and_biased_like_any_other(
    model: CausalModel, text_ids: list[int]
) -> None:
    """At temperature 1 two hundred seeds draw the likeliest as often as its probability says. A bias bans it; and where
    it ends the answer, min_tokens does."""
    prompt = tuple(text_ids[40:46])
    drawn = SamplingParams(1, temperature=1.0, logprobs=0)
    greedy = replace(drawn, temperature=0.0)
    cluster = pools(model)
    asks = [Ask(prompt, replace(drawn, seed=seed)) for seed in range(SEEDS)]
    answers = cluster.together([*asks, Ask(prompt, greedy)])
    best = answers.pop()
    (token,), probability = best.ids, math.exp(best.logprobs[0].chosen)
    counts = Counter(answer.ids[0] for answer in answers)
    deviation = math.sqrt(SEEDS * probability * (1 - probability))
    assert abs(counts[token] - SEEDS * probability) < 4 * deviation and len(counts) > 10
    for answer in answers:
        assert answer.ids[0] != token or answer.logprobs == best.logprobs
    two = replace(greedy, max_tokens=2, end_token_ids=(token,))
    banned, ended, not_yet = cluster.together([
        Ask(prompt, replace(greedy, logit_bias=((token, -100.0),))),
        Ask(prompt, two),
        Ask(prompt, replace(two, min_tokens=2)),
    ])  # fmt: skip
    assert banned.ids[0] != token
    assert (ended.ids, ended.end) == ((token,), "stop")
    assert not_yet.ids[0] != token and len(not_yet.ids) == 2
    assert cluster.counted("decode-0", "kv_transfer_bytes_total") > 0, "the last one went on there"


def test_BR_076_the_first_token_has_its_log_probability(
    model: CausalModel, text_ids: list[int], oracle: Oracle
) -> None:
    """Five for five tokens, each the same as from a worker that does it all; also where the first is the only one."""
    asks = [
        Ask(tuple(text_ids[60:93]), SamplingParams(count, temperature=0.0, logprobs=1)) for count in (5, 1)
    ]
    five, one = answers = pools(model).together(asks)
    assert [len(answer.logprobs) for answer in answers] == [5, 1] and five.logprobs[:1] == one.logprobs
    assert answers == oracle(asks)
    assert all(said.chosen < 0 and len(said.top) == 1 for said in five.logprobs)
