"""The virtual model: a runner that knows batches and nothing else, and remembers what each block would hold. Pure.

It is fed what the real runner is fed (slots that leave, join and grow, then rows), so a wrong delta, a wrong block
table, a late write or a lost block shows as a wrong content. A block's content is the list of token ids whose KV
it would hold; the next token is a function of the last one and its position.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.batching import Batch, RowResult
from common.request import TokenLogprobs

VOCABULARY = 50_000
CHECK_EVERY = 64
"""A decoding slot's whole context is checked each time it has grown by so many tokens, and at every chunk."""


def next_token(last: int, length: int, child: int = 0, seed: int = 0) -> int:
    """What follows `length` tokens of which `last` is the last, in this choice and by this seed."""
    return (last * 31 + length * 7 + 1 + child * 13 + seed * 17) % VOCABULARY


def continuation(prompt: list[int], count: int, child: int = 0, seed: int = 0) -> list[int]:
    """The `count` tokens that every path must give after `prompt`."""
    tokens: list[int] = []
    last, length = prompt[-1], len(prompt)
    for _ in range(count):
        last = next_token(last, length, child, seed)
        length += 1
        tokens.append(last)
    return tokens


def prompt_scores(prompt: list[int], first: int, end: int) -> tuple[TokenLogprobs, ...]:
    """What every path must say of the prompt's tokens `first` to `end` - 1: a function of index and tokens so far."""
    return tuple(
        TokenLogprobs(-float((prompt[index - 1] * 31 + prompt[index] * 17 + index) % 1009))
        for index in range(first, end)
    )


@dataclass(slots=True)
class Row:
    """Not frozen: one is made for every token, and freezing would triple its cost."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


NO_TOKEN = Row(())


@dataclass(slots=True)
class _Slot:
    blocks: list[int]
    tokens: list[int]  # what the slot has been told: at its joining, then row by row
    turn: int  # what choice and seed add to each token
    prompt_len: int
    scored: int  # prompt tokens that need no log-probability


class VirtualModel:
    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self.content: list[list[int]] = [[] for _ in range(num_blocks)]
        self._newest: list[RowResult] = []  # of the batch before

    def run(self, batch: Batch) -> list[RowResult]:
        """One step, as `kernels.runner.ModelRunner.run` does it."""
        for slot in batch.left:
            self._slots[slot] = None
        for joined in batch.joined:
            scored = joined.prompt_len if joined.sampling.prompt_logprobs is None else joined.scored
            turn = joined.sampling.child * 13 + joined.sampling.seed * 17
            self._slots[joined.slot] = _Slot(
                list(joined.blocks), list(joined.tokens), turn, joined.prompt_len, scored
            )
        for slot, blocks in batch.grown:
            self._held(slot).blocks += blocks
        token_ids = batch.token_ids
        if batch.ahead:
            token_ids = [self._newest[-1 - token].ids[0] if token < 0 else token for token in token_ids]
        if batch.num_tokens == len(batch.slots) and all(batch.samples):
            self._newest = self._decode_rows(batch, token_ids)
        else:
            self._newest = self._rows(batch, token_ids)
        return self._newest

    def _decode_rows(self, batch: Batch, token_ids: list[int]) -> list[RowResult]:
        """Every row computes one token."""
        results: list[RowResult] = []
        size, content, slots = self._block_size, self.content, self._slots
        for slot, start, token in zip(batch.slots, batch.starts, token_ids, strict=True):
            held = slots[slot]
            assert held is not None, f"slot {slot} is empty"
            block = content[held.blocks[start // size]]
            if len(block) == start % size and len(held.tokens) == start and start % CHECK_EVERY:
                block.append(token)
                held.tokens.append(token)
            else:
                self._write(held, start, token)
            results.append(Row(((token * 31 + start * 7 + 8 + held.turn) % VOCABULARY,)))
        return results

    def _rows(self, batch: Batch, token_ids: list[int]) -> list[RowResult]:
        results: list[RowResult] = []
        at = 0
        for slot, start, count, samples in zip(
            batch.slots, batch.starts, batch.counts, batch.samples, strict=True
        ):
            held, ids = self._held(slot), token_ids[at : at + count]
            at += count
            for offset, token in enumerate(ids):
                self._write(held, start + offset, token)
            self._check(held, start + count)
            next_ids = ((next_token(ids[-1], start + count) + held.turn) % VOCABULARY,) if samples else ()
            first, end = max(start + 1, held.scored), min(start + count + 1, held.prompt_len)
            if first < end:
                results.append(Row(next_ids, None, prompt_scores(held.tokens, first, end)))
            else:
                results.append(Row(next_ids) if samples else NO_TOKEN)
        return results

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is empty"
        return held

    def _write(self, held: _Slot, position: int, token: int) -> None:
        tokens = held.tokens
        if position == len(tokens):
            tokens.append(token)
        assert tokens[position] == token, f"position {position} is {tokens[position]}, now said to be {token}"
        offset = position % self._block_size
        block = self.content[held.blocks[position // self._block_size]]
        if len(block) > offset:
            del block[offset:]
        block.append(token)
        assert len(block) == offset + 1, f"position {position} follows a hole"
        if position % CHECK_EVERY == 0:
            self._check(held, position + 1)

    def _check(self, held: _Slot, length: int) -> None:
        """Every token's KV is where the slot's block table says."""
        size = self._block_size
        for index in range(-(-length // size)):
            expected = held.tokens[index * size : min(length, (index + 1) * size)]
            found = self.content[held.blocks[index]][: len(expected)]
            assert found == expected, f"block {held.blocks[index]} holds {found}, not {expected}"
