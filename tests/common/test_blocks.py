"""BlockPool: every block is in one place at any time, whatever is done to it."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.blocks import BlockPool

TOTAL = 12
CONTENTS = [bytes([i]) * 16 for i in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps who holds what, and the cached blocks in order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.holdings: list[list[int]] = []
        self.names: dict[int, bytes] = {}  # what held and cached blocks are known to contain
        self.cached: list[int] = []

    def holders(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.holdings)

    @rule(count=st.integers(0, TOTAL + 2))
    def allocate(self, count: int) -> None:
        free = self.pool.free
        blocks = self.pool.allocate(count)
        if count > free + len(self.cached):
            assert blocks is None
            return
        assert blocks is not None and len(set(blocks)) == count
        assert all(self.holders(block) == 0 for block in blocks), "a held block was given again"
        evicted = max(0, count - free)
        assert [b for b in blocks if b in self.cached] == self.cached[:evicted], "not the oldest first"
        for block in self.cached[:evicted]:
            del self.names[block]
        self.cached = self.cached[evicted:]
        if blocks:
            self.holdings.append(blocks)

    @rule(index=st.integers(0, 7), content=st.sampled_from(CONTENTS))
    @precondition(lambda self: self.holdings)
    def publish(self, index: int, content: bytes) -> None:
        blocks = self.holdings[index % len(self.holdings)]
        block = blocks[index % len(blocks)]
        self.pool.publish(block, content)
        if content not in self.names.values() and block not in self.names:
            self.names[block] = content

    @rule(contents=st.lists(st.sampled_from(CONTENTS), max_size=4))
    def hit(self, contents: list[bytes]) -> None:
        where = {content: block for block, content in self.names.items()}
        expected: list[int] = []
        for content in contents:
            if content not in where:
                break
            expected.append(where[content])
        blocks = self.pool.match(contents)
        assert blocks == expected, "hits are the contiguous prefix, no more"
        self.pool.acquire(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        if blocks:
            self.holdings.append(blocks)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.holdings)
    def release(self, index: int) -> None:
        blocks = self.holdings.pop(index % len(self.holdings))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.holders(block) == 0 and block in self.names and block not in self.cached:
                self.cached.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        for block in self.cached:
            del self.names[block]
        self.cached = []

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        held = {block for blocks in self.holdings for block in blocks}
        assert self.pool.held == len(held)
        assert self.pool.cached == len(self.cached)
        assert self.pool.free == TOTAL - len(held) - len(self.cached)
        assert self.pool.available == TOTAL - len(held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_hits_stop_at_the_first_missing_block() -> None:
    """BR-063: blocks 1 to 3 are cached, 1 is evicted; the orphans count for nothing."""
    pool = BlockPool(3)
    first = pool.allocate(1)
    rest = pool.allocate(2)
    assert first is not None and rest is not None
    for block, content in zip(first + rest, CONTENTS[:3], strict=True):
        pool.publish(block, content)
    pool.release(first)
    taken = pool.allocate(1)
    assert taken == first
    assert pool.match(CONTENTS[:3]) == []


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, content in zip(blocks, CONTENTS, strict=False):
        pool.publish(block, content)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(CONTENTS[:3]) == blocks[:2]


def test_a_block_released_more_often_than_held_is_our_mistake() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="0 places"):
        pool.check()
