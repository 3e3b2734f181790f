"""Sampling in C (kernels/native/sampling.c): one call for all rows. Checks sizes; the C side sees addresses only."""

import struct
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from kernels.model_config import MAX_VOCAB
from kernels.sampling import Draw, Sampled, in_vocabulary
from kernels.step import TokenLogprob

_DRAW = struct.Struct("=6d3Q2q2Qq2QqQqQ")  # `draw` of sampling.c
_LOW_64 = (1 << 64) - 1
_NONE = 0  # an address


class NativeSampler:
    """`Sampler` with the bits of `NumpySampler`. Belongs to one thread at a time: all calls use its workspace."""

    def __init__(self, native: ModuleType, variant: str | None = None) -> None:
        self._native = native
        variants = ("avx512", "avx2", "plain") if variant is None else (variant,)
        chosen = next((name for name in variants if native.has_sampling_variant(name)), None)
        if chosen is None:
            raise ValueError(f"this processor has no {variant}")
        self._variant = chosen
        self.name = f"native-{chosen}"
        self._workspace = np.empty(0, dtype=np.uint8)
        self._workspace_vocab = -1

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
        assert len(draws) == len(logits)
        if not draws:
            return []
        rows, vocab = _checked(logits)
        held: list[np.ndarray] = []  # arrays whose addresses are in `packed`
        packed = b"".join([_pack(draw, vocab, held) for draw in draws])
        asked = [draw.sampling.logprobs for draw in draws]
        width = min(max((top or 0 for top in asked), default=0), vocab)
        tokens = np.empty(rows, dtype=np.int32)
        values = np.empty((rows, 1 + width), dtype=np.float64)
        ids = np.empty((rows, width), dtype=np.int32)
        self._native.sample(
            self._variant,
            *(logits.ctypes.data, rows, vocab, logits.strides[0] // 4),
            packed,
            *(tokens.ctypes.data, values.ctypes.data, ids.ctypes.data, width),
            self._space(vocab),
        )
        return [
            None
            if token_id < 0
            else (token_id, None if top is None else _said(token_id, values[row], ids[row], top))
            for row, (token_id, top) in enumerate(zip(tokens.tolist(), asked, strict=True))
        ]

    def score(
        self, logits: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob | None]:
        if not len(logits):
            return []
        rows, vocab = _checked(logits)
        tokens = in_vocabulary(token_ids, vocab)
        asked = np.minimum(np.asarray(tops, dtype=np.int32), vocab)
        assert len(tokens) == len(asked) == rows
        width = int(asked.max(initial=0))
        good = np.empty(rows, dtype=np.uint8)
        values = np.empty((rows, 1 + width), dtype=np.float64)
        ids = np.empty((rows, width), dtype=np.int32)
        self._native.score(
            self._variant,
            *(logits.ctypes.data, rows, vocab, logits.strides[0] // 4),
            *(tokens.ctypes.data, asked.ctypes.data, good.ctypes.data),
            *(values.ctypes.data, ids.ctypes.data, width),
            self._space(vocab),
        )
        return [
            _said(token_ids[row], values[row], ids[row], tops[row]) if good[row] else None
            for row in range(rows)
        ]

    def _space(self, vocab: int) -> int:
        """The address of a workspace for that vocabulary, aligned to 64 bytes."""
        if vocab != self._workspace_vocab:
            self._workspace = np.empty(self._native.sampling_workspace_bytes(vocab) + 64, dtype=np.uint8)
            self._workspace_vocab = vocab
        return -(-self._workspace.ctypes.data // 64) * 64


def _checked(logits: np.ndarray) -> tuple[int, int]:
    rows, vocab = logits.shape
    assert logits.dtype == np.float32 and logits.strides[1] == 4 and logits.strides[0] % 4 == 0
    assert 0 < vocab <= MAX_VOCAB
    return rows, vocab


def _pack(draw: Draw, vocab: int, held: list[np.ndarray]) -> bytes:
    """Most rows change no logits, and pay for none of that."""
    sampling, counts, allowed = draw.sampling, draw.counts, draw.allowed
    seen = outputs = biased = biases = banned = mask = _NONE
    num_seen = num_banned = 0
    num_biased = len(sampling.logit_bias)
    if counts is not None:
        if counts.vocab_size > vocab:
            raise IndexError(f"counts of a vocabulary of {counts.vocab_size}, logits of {vocab}")
        num_seen, seen, outputs = len(counts), counts.ids.ctypes.data, counts.outputs.ctypes.data
        held += counts.ids, counts.outputs
    if num_biased:
        ids = in_vocabulary([token_id for token_id, _ in sampling.logit_bias], vocab)
        values = np.asarray([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        biased, biases = ids.ctypes.data, values.ctypes.data
        held += ids, values
    if draw.bans_ends:
        ends = in_vocabulary(sampling.end_token_ids, vocab)
        num_banned, banned = len(ends), ends.ctypes.data
        held.append(ends)
    if allowed is not None:
        if allowed.shape != (vocab,) or allowed.dtype != np.bool_ or not allowed.flags.c_contiguous:
            raise IndexError(f"a mask of {allowed.dtype} {allowed.shape}, logits of {vocab}")
        mask = allowed.ctypes.data
        held.append(allowed)
    return _DRAW.pack(
        *(sampling.temperature, sampling.top_p, sampling.min_p),
        *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        *(sampling.seed & _LOW_64, draw.output_index, sampling.child),
        *(sampling.top_k, -1 if sampling.logprobs is None else min(sampling.logprobs, vocab)),
        *(seen, outputs, num_seen),
        *(biased, biases, num_biased),
        *(banned, num_banned),
        mask,
    )


def _said(token_id: int, values: np.ndarray, ids: np.ndarray, top: int) -> TokenLogprob:
    best = zip(ids[:top].tolist(), values[1 : 1 + top].tolist(), strict=False)
    return TokenLogprob(token_id, float(values[0]), tuple(best))
