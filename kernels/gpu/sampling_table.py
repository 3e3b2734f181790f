"""How each row of a batch is sampled, as the kernel of `kernels/gpu/sampling.py` reads it: one buffer, one copy up.

rows      one `ROW` each
payload   int32 words that rows point into: seen ids | how often each was output | biased ids | biases | which
          turn each has | banned ids | grammar masks, 32 ids to a word
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.model_config import MAX_VOCAB
from kernels.sampling import UNIT, Draw, TokenCounts, in_vocabulary

ROW = np.dtype(
    [
        ("seed", "u8"),
        ("top_p", "f8"),  # 1: off
        ("min_weight", "i8"),  # min-p as the least weight that is kept; 0: off
        ("temperature", "f4"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("top_k", "i4"),  # 0: off
        ("output_index", "u4"),
        ("child", "u4"),
        ("draws", "i4"),  # 0: greedy
        ("changes", "i4"),  # 0: the model's own logits are sampled from
        ("seen_at", "i4"),  # places in words from the buffer's begin; ids, then counts
        ("num_seen", "i4"),
        ("biased_at", "i4"),  # ids, then biases, then turns
        ("num_biased", "i4"),
        # An id that is biased twice is biased in two of them, in order: fp32 sums are not one sum.
        ("turns", "i4"),
        ("banned_at", "i4"),
        ("num_banned", "i4"),
        ("mask_at", "i4"),  # 0: no grammar
        ("unused", "i4"),  # a multiple of 8 bytes
    ]
)
ROW_WORDS = ROW.itemsize // 4
_LOW_32, _LOW_64 = (1 << 32) - 1, (1 << 64) - 1
_MOST_WORDS = 2**31 - 1


def word_of(name: str) -> int:
    """Where a field of 4 bytes lies in a row, in words; one of 8 bytes in pairs of words."""
    dtype, begin = ROW.fields[name][:2]  # type: ignore[index]
    return int(begin) // dtype.itemsize


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """`words` int32 on the device, as above. The rest is what the launch needs to know of it."""

    words: torch.Tensor
    num_rows: int
    vocab_size: int
    any_draws: bool
    any_changes: bool

    @classmethod
    def from_draws(
        cls, draws: Sequence[Draw], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingTable:
        """One copy, which the host does not wait for. Raises IndexError where a draw names an id outside the
        vocabulary, or has a mask of another one: the kernel reads and writes where they point."""
        assert 0 < vocab_size <= MAX_VOCAB
        there = torch.device(device)
        payload = _Payload(len(draws) * ROW_WORDS)
        rows = np.array([_row(draw, vocab_size, payload) for draw in draws], dtype=ROW)
        # Pinned memory comes from torch's cache, which does not give it out again before the copy is over.
        buffer = torch.empty(payload.end, dtype=torch.int32, pin_memory=there.type == "cuda")
        words = buffer.numpy()
        words[: len(draws) * ROW_WORDS] = rows.view(np.int32)
        payload.write(words)
        return cls(
            words=buffer.to(there, non_blocking=True),
            num_rows=len(draws),
            vocab_size=vocab_size,
            any_draws=bool(rows["draws"].any()),
            any_changes=bool(rows["changes"].any()),
        )


class _Payload:
    """Arrays that rows point to, in the order of their adding."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.end = begin
        self._parts: list[np.ndarray] = []

    def add(self, *arrays: np.ndarray) -> int:
        """4 bytes an element, one array behind the other. Returns where the first begins."""
        at = self.end
        for array in arrays:
            part = array.view(np.int32)
            self._parts.append(part)
            self.end += len(part)
        assert self.end <= _MOST_WORDS
        return at

    def write(self, words: np.ndarray) -> None:
        if self._parts:
            np.concatenate(self._parts, out=words[self._begin :])


def _row(draw: Draw, vocab: int, payload: _Payload) -> tuple[float, ...]:
    """In the order of `ROW`. Most rows change no logits, and pay for none of that."""
    sampling = draw.sampling
    seen_at = num_seen = biased_at = turns = banned_at = num_banned = mask_at = 0
    num_biased = len(sampling.logit_bias)
    if draw.counts is not None:
        seen_at, num_seen = _add_seen(draw.counts, vocab, payload), len(draw.counts)
    if num_biased:
        biased_at, turns = _add_biases(sampling.logit_bias, vocab, payload)
    if draw.bans_ends:
        ends = in_vocabulary(sampling.end_token_ids, vocab)
        banned_at, num_banned = payload.add(ends), len(ends)
    if draw.allowed is not None:
        mask_at = payload.add(_packed(draw.allowed, vocab))
    min_weight = min(math.ceil(sampling.min_p * UNIT), UNIT) if sampling.min_p > 0.0 else 0
    return (
        *(sampling.seed & _LOW_64, min(sampling.top_p, 1.0), min_weight, sampling.temperature),
        *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        sampling.top_k if 0 < sampling.top_k < vocab else 0,
        *(draw.output_index & _LOW_32, sampling.child & _LOW_32),
        *(not draw.greedy, bool(num_seen or num_biased or num_banned or mask_at)),
        *(seen_at, num_seen, biased_at, num_biased, turns, banned_at, num_banned, mask_at, 0),
    )


def _add_seen(counts: TokenCounts, vocab: int, payload: _Payload) -> int:
    if counts.vocab_size > vocab:
        raise IndexError(f"counts of a vocabulary of {counts.vocab_size}, logits of {vocab}")
    return payload.add(counts.ids[: len(counts)], counts.outputs[: len(counts)])


def _add_biases(pairs: Sequence[tuple[int, float]], vocab: int, payload: _Payload) -> tuple[int, int]:
    """Where, and in how many turns."""
    ids = in_vocabulary([token_id for token_id, _ in pairs], vocab)
    biases = np.asarray([bias for _, bias in pairs], dtype=np.float32)
    before: dict[int, int] = {}
    turns = np.zeros(len(ids), dtype=np.int32)
    for place, token_id in enumerate(ids.tolist()):
        turns[place] = before.get(token_id, 0)
        before[token_id] = int(turns[place]) + 1
    return payload.add(ids, biases, turns), int(turns.max()) + 1


def _packed(allowed: np.ndarray, vocab: int) -> np.ndarray:
    """Bit i % 32 of word i // 32 is id i."""
    if allowed.shape != (vocab,) or allowed.dtype != np.bool_:
        raise IndexError(f"a mask of {allowed.dtype} {allowed.shape}, logits of {vocab}")
    bits = np.zeros(-(-vocab // 32) * 4, dtype=np.uint8)
    packed = np.packbits(allowed, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view(np.int32)
