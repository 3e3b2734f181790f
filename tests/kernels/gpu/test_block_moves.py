"""Blocks gathered, scattered, copied and hashed on a device, against plain indexing and the hash on the host."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.block_hash import block_hash
from kernels.gpu.block_moves import (
    TILE,
    copy_hashed,
    gather_blocks,
    gather_hashed,
    hash_blocks,
    scatter_blocks,
    scatter_hashed,
)
from tests.kernels.gpu.grid import WHOLE

WORDS = (
    1,
    2,
    3,
    TILE - 1,
    TILE,
    TILE + 1,
    *((7, 255, 2 * TILE, 5 * TILE + 13) if WHOLE else (2 * TILE + 5,)),
)
POISON = 0xA5
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux; Python has no name for it


def random_blocks(count: int, block_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    )


def poisoned(count: int, block_bytes: int) -> torch.Tensor:
    return torch.full((count, block_bytes), POISON, dtype=torch.uint8)


def on_host(blocks: torch.Tensor) -> list[int]:
    found: list[int] = block_hash(blocks.numpy()).tolist()
    return found


@pytest.mark.parametrize("kind", (torch.int32, torch.int64))
@pytest.mark.parametrize("words", WORDS)
def test_what_moves_is_what_was_there_and_nothing_else_changes(words: int, kind: torch.dtype) -> None:
    pool, chosen = random_blocks(7, 8 * words), [5, 0, 3]
    blocks = torch.tensor(chosen, dtype=kind)
    wanted = pool[chosen]

    for gathered in (gather_blocks, gather_hashed):
        out = poisoned(5, 8 * words)
        hashes = gathered(pool, blocks, out)
        assert torch.equal(out[:3], wanted) and bool(out[3:].eq(POISON).all())
        assert hashes is None or hashes.tolist() == on_host(wanted)

    for scattered in (scatter_blocks, scatter_hashed):
        there = poisoned(7, 8 * words)
        hashes = scattered(wanted.contiguous(), blocks, there)
        assert torch.equal(there[chosen], wanted) and bool(there[[1, 2, 4, 6]].eq(POISON).all())
        assert hashes is None or hashes.tolist() == on_host(wanted)

    other = poisoned(4, 8 * words)
    hashes = copy_hashed(pool, other, torch.tensor([chosen, [2, 3, 0]], dtype=kind))
    assert torch.equal(other[[2, 3, 0]], wanted) and bool(other[1].eq(POISON).all())
    assert hashes.tolist() == on_host(wanted) == hash_blocks(pool, blocks).tolist()


def test_a_hash_does_not_depend_on_how_a_block_is_cut_or_on_its_neighbours() -> None:
    pool = random_blocks(3, 8 * 300)
    wanted = on_host(pool)
    for tile in (32, 128, 256, 512):
        assert hash_blocks(pool, torch.arange(3), tile=tile).tolist() == wanted
    for block in range(3):
        assert hash_blocks(pool, torch.tensor([block])).tolist() == [wanted[block]]


def test_a_pool_of_any_dtype_and_shape_is_bytes() -> None:
    pool = torch.randn((3, 2, 2, 4, 5), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.zeros((2, 160), dtype=torch.uint8)
    gather_blocks(pool, torch.tensor([2, 1]), out)
    assert torch.equal(out.view(torch.bfloat16).view(2, 2, 2, 4, 5), pool[[2, 1]])


def test_a_number_that_is_no_blocks_is_neither_read_nor_written() -> None:
    pool, out = random_blocks(3, 64), poisoned(3, 64)
    blocks = torch.tensor([3, -1, 2], dtype=torch.int32)
    assert gather_hashed(pool, blocks, out).tolist() == [0, 0, *on_host(pool[2:])]
    assert bool(out[:2].eq(POISON).all()) and torch.equal(out[2], pool[2])
    whole = random_blocks(5, 64, seed=1)
    there, before = whole[1:4], whole.clone()  # what lies beside it must stay as well
    assert scatter_hashed(pool[:2], torch.tensor([-1, 3]), there).tolist() == [0, 0]
    assert torch.equal(whole, before)
    assert scatter_hashed(pool, torch.tensor([-1, 3, 2**31], dtype=torch.int64), there).tolist() == [0, 0, 0]
    assert torch.equal(whole, before)
    assert copy_hashed(pool, there, torch.tensor([[0, 9, 1], [3, 0, 1]])).tolist() == [
        0,
        0,
        *on_host(pool[1:2]),
    ]
    assert torch.equal(there[1], pool[1])
    assert torch.equal(whole[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_a_block_that_lies_past_two_to_the_31_words_is_found() -> None:
    """In memory of which two pages are touched."""
    words = 2048
    num_blocks = 2**31 // words + 3
    memory = mmap.mmap(-1, num_blocks * 8 * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    pool = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, -1)
    content, far = random_blocks(1, 8 * words), torch.tensor([num_blocks - 2], dtype=torch.int32)
    scatter_blocks(content, far, pool)
    assert torch.equal(pool[num_blocks - 2], content[0])
    out = poisoned(1, 8 * words)
    assert gather_hashed(pool, far, out).tolist() == on_host(content)
    assert torch.equal(out, content)
    assert copy_hashed(pool, out, torch.tensor([[num_blocks - 2], [0]])).tolist() == on_host(content)


def test_no_blocks_are_no_launch() -> None:
    pool, none = random_blocks(2, 64), torch.empty(0, dtype=torch.int32)
    assert hash_blocks(pool, none).tolist() == []
    gather_blocks(pool, none, poisoned(1, 64))


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda p, b: gather_blocks(p, b, poisoned(3, 56)), "blocks of 64 bytes into blocks of 56"),
        (lambda p, b: gather_blocks(p, b, poisoned(2, 64)), "3 block numbers for 2 rows"),
        (lambda p, b: scatter_blocks(poisoned(2, 64), b, p), "3 block numbers for 2 rows"),
        (lambda p, b: hash_blocks(p, b.float()), "float32: int32 or int64"),
        (lambda p, b: hash_blocks(p, b.view(1, 3)), r"\[rows\] wanted"),
        (lambda p, b: copy_hashed(p, p, b), r"\[2, rows\] wanted"),
        (lambda p, b: hash_blocks(p[:, :12], b), "in one piece"),
        (lambda p, b: hash_blocks(p[:, :12].contiguous(), b), "12 bytes is not made of words"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[torch.Tensor, torch.Tensor], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call(random_blocks(4, 64), torch.tensor([0, 1, 2]))


# ---------------------------------------------------------------- the hash


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_one_flipped_bit_anywhere_changes_the_hash(words: int, seed: int, data: st.DataObject) -> None:
    block = random_blocks(1, 8 * words, seed)
    spoilt = block.clone()
    bit = data.draw(st.integers(0, 64 * words - 1))
    spoilt[0, bit // 8] ^= 1 << (bit % 8)
    assert on_host(block) != on_host(spoilt)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**32), st.data())
def test_swapped_words_change_the_hash(words: int, seed: int, data: st.DataObject) -> None:
    block = random_blocks(1, 8 * words, seed).view(torch.int64)
    one, other = data.draw(st.lists(st.integers(0, words - 1), min_size=2, max_size=2, unique=True))
    swapped = block.clone()
    swapped[0, one], swapped[0, other] = block[0, other], block[0, one]
    assert on_host(block.view(torch.uint8)) != on_host(swapped.view(torch.uint8))


def test_blocks_that_damage_makes_are_told_apart() -> None:
    """All zeros and all ones, shifted, words repeated, equal changes in two places that would cancel in a plain sum."""
    base = random_blocks(1, 1024).numpy()[0]
    kinds = [
        base,
        np.roll(base, 1),
        np.roll(base, 8),
        np.roll(base, -8),
        np.zeros_like(base),
        ~np.zeros_like(base),
    ]
    words = base.view(np.int64)
    for at in range(0, 128, 2):
        raised = words.copy()
        raised[at] += 1
        raised[at + 1] -= 1
        kinds.append(raised.view(np.uint8))
        repeated = words.copy()
        repeated[at + 1] = repeated[at]
        kinds.append(repeated.view(np.uint8))
    assert len({int(block_hash(kind)) for kind in kinds}) == len(kinds)


def test_the_hash_is_the_one_that_is_written_down() -> None:
    """Word by word in Python's own integers."""
    block = random_blocks(1, 24).numpy()[0]
    total = 0
    for number, word in enumerate(block.view(np.uint64).tolist(), start=1):
        x = (word + number * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        total += x ^ (x >> 31)
    assert int(block_hash(block)) % 2**64 == total % 2**64


def test_a_block_of_half_a_word_has_no_hash() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        block_hash(np.zeros(12, dtype=np.uint8))
