"""A choice is a function of its request and its number: with the others, sharing their prompt, it has the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.virtual_cluster import FRONT
from common.request import Request, RequestId, pack_ids
from kernels.model import CausalModel
from tests.exactness.conftest import Oracle, greedy, seeded
from tests.exactness.real_cluster import Ask, RealCluster, Said, collocated, pools, said

CHILDREN = 4
OUTPUTS = 5
PROMPT_TOKENS = 101  # six whole blocks, which the others find, and five tokens


def together(cluster: RealCluster, name: str, asks: list[Ask]) -> list[Said]:
    """As choices of one request."""
    requests = [
        Request(RequestId(f"{name}.{child}"), pack_ids(ask.prompt), ask.sampling, FRONT, leader=f"{name}.0")
        for child, ask in enumerate(asks)
    ]
    answers = cluster.submit_group(requests)
    cluster.run_until(lambda: all(answer.end is not None for answer in answers))
    cluster.settle()
    return [said(answer) for answer in answers]


@pytest.mark.parametrize(("path", "caching"), [("pools", False), ("collocated", True)])
def test_each_choice_is_what_it_is_alone(
    path: str, caching: bool, model: CausalModel, text_ids: list[int], oracle: Oracle
) -> None:
    make = pools if path == "pools" else collocated
    cluster: RealCluster = make(model, chunk=64, caching=caching)
    prompt = tuple(text_ids[40 : 40 + PROMPT_TOKENS])
    drawn = [Ask(prompt, replace(seeded(11, OUTPUTS), child=child)) for child in range(CHILDREN)]
    found = together(cluster, "drawn", drawn)
    assert found == oracle(drawn)
    assert len({one.ids for one in found}) == CHILDREN, "choices differ"
    assert together(cluster, "again", drawn) == found, "and do so again with the same seed"

    likely = [Ask(prompt, replace(greedy(OUTPUTS), child=child)) for child in range(2)]
    first, second = together(cluster, "greedy", likely)
    assert first == second == oracle(likely[:1])[0], "the most likely token is nobody's draw"

    # Where caching is off the families find nothing of each other's.
    followers = 2 * (CHILDREN - 1) + 1
    finders = followers + 2 if caching else followers
    for worker in ("prefill-0", "decode-0") if path == "pools" else ("decode-0",):
        assert cluster.counted(worker, "prefix_cache_hits_total") == finders * 96
