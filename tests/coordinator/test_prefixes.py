"""What is thought to be in each worker's cache: beginnings, by whole pieces, of this life, and no more than fits."""

from __future__ import annotations

from dataclasses import replace

from common.messages import Sender
from common.request import Incarnation
from coordinator.prefixes import MOST_PIECES, PIECE_TOKENS, Prefixes, chain_of
from coordinator.registry import Registry, Worker
from tests.coordinator.cluster_bench import card, request


def worker(incarnation: int = 1, blocks: int = 64) -> Worker:
    registry = Registry(tokenizer_hash=None, fronts={})
    registry.register(card("p0", blocks=blocks), Sender("p0", Incarnation(incarnation)), 0.0)
    return registry.all()[0]


def test_a_chain_is_of_whole_pieces_and_of_what_stands_before_them() -> None:
    long, longer = chain_of(request("a", 3 * PIECE_TOKENS)), chain_of(request("b", 4 * PIECE_TOKENS - 1))
    assert len(long) == 3 and long == longer, "a part of a piece is none"
    other = chain_of(request("c", 3 * PIECE_TOKENS, first_id=1))
    assert not set(long) & set(other)
    salted = chain_of(replace(request("d", 3 * PIECE_TOKENS), cache_salt="mine"))
    assert not set(long) & set(salted)
    assert len(chain_of(request("e", (MOST_PIECES + 5) * PIECE_TOKENS))) == MOST_PIECES
    answered = chain_of(request("f", PIECE_TOKENS), list(range(PIECE_TOKENS, 2 * PIECE_TOKENS)))
    assert answered == long[:2], "an answer goes on where its prompt ends"


def test_hits_are_the_beginning_that_was_computed_there_in_this_life() -> None:
    prefixes, here = Prefixes(), worker()
    chain = chain_of(request("a", 5 * PIECE_TOKENS))
    assert prefixes.hits(here, chain) == 0
    prefixes.computed(here, chain[:3])
    assert prefixes.hits(here, chain) == 3 * PIECE_TOKENS
    assert prefixes.hits(here, chain[1:]) == 2 * PIECE_TOKENS
    assert prefixes.hits(here, chain_of(request("b", 5 * PIECE_TOKENS, first_id=9))) == 0
    assert prefixes.hits(worker(incarnation=2), chain) == 0
    prefixes.computed(worker(incarnation=2), chain[:1])
    assert prefixes.hits(here, chain) == 0, "that life is over"


def test_no_more_is_remembered_than_the_pool_holds_and_beginnings_last_longest() -> None:
    prefixes, here = Prefixes(), worker(blocks=4 * PIECE_TOKENS // 16)
    first, second = (chain_of(request("r", 3 * PIECE_TOKENS, first_id=n)) for n in (0, 7))
    prefixes.computed(here, first)
    prefixes.computed(here, second)
    assert prefixes.hits(here, second) == 3 * PIECE_TOKENS
    assert prefixes.hits(here, first) == PIECE_TOKENS
