"""The KV blocks of one worker: which are free, held, or cached for their content. Pure.

    free ──allocate──▶ held ──release──▶ free            (content unknown)
                        │  ▲
                 publish│  │acquire (a prefix hit)
                        ▼  │
                       held, with a hash ──release──▶ cached ──evicted by allocate──▶ held

Each block is in exactly one of the three; free + held + cached = total always. A held block may have several
holders (a shared prefix); blocks with more than one are never written, because only whole, computed blocks are
ever published and a prefix hit stops before the last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LEAST_TOKENS = 64
"""Prompt and answer of a short chat: a pool in which not even that fits serves hardly anybody."""


def least_blocks(block_size: int, max_model_len: int | None = None) -> int:
    """How many a pool must have to be of use, where requests may be as long as `max_model_len`."""
    return -(-min(LEAST_TOKENS, max_model_len or LEAST_TOKENS) // block_size)


def too_few_blocks(least: int, block_size: int) -> str:
    """What to say of a pool that has fewer."""
    tokens = least * block_size
    return f"a short chat and its answer do not fit; {least} is the least ({tokens} tokens in blocks of {block_size})"


class BlockPool:
    """Bookkeeping by block id; knows no bytes. Cached blocks are evicted least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.total = num_blocks
        self._holders = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of release, oldest first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with unknown content and one holder, or None when there are not so many."""
        free, holders = self._free, self._holders
        if count > len(free) + len(self._cached):
            return None
        blocks = []
        for _ in range(count):
            block = free.pop() if free else self._evict()
            holders[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest contiguous prefix of `hashes`. Holds nothing: see `acquire`."""
        found = []
        for content in hashes:
            block = self._by_hash.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`, which are held or cached."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each. The tail of a sequence is evicted before its head, so hits stay long."""
        all_holders = self._holders
        for block in reversed(blocks):
            holders = all_holders[block] - 1
            assert holders >= 0, f"block {block} released more often than held"
            all_holders[block] = holders
            if holders == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, content: bytes) -> None:
        """Says what a held, completely computed block contains. The first block of a content stays its name."""
        assert self._holders[block] > 0
        if content not in self._by_hash and self._hash[block] is None:
            self._hash[block] = content
            self._by_hash[content] = block

    def forget_cached(self) -> None:
        """Drops all content nobody holds."""
        while self._cached:
            self._free.append(self._evict())

    def check(self) -> None:
        """Asserts that every block is in exactly one place and that content and block name each other."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, holders in enumerate(self._holders):
            assert holders >= 0
            places = (block in free) + (holders > 0) + (block in self._cached)
            assert places == 1, f"block {block} is in {places} places"
            assert self._hash[block] is None or block not in free, f"free block {block} has a name"
        named = {content: block for block, content in enumerate(self._hash) if content is not None}
        assert named == self._by_hash
        assert self._cached.keys() <= set(named.values())

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        content = self._hash[block]
        assert content is not None
        self._hash[block] = None
        del self._by_hash[content]
        return block
