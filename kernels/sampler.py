"""Sampling behind one seam: C where it was built, numpy elsewhere. Both give the same bits."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kernels.native_backend import load_native
from kernels.native_sampling import NativeSampler
from kernels.sampling import Draw, NumpySampler, Sampled
from kernels.step import TokenLogprob


class Sampler(Protocol):
    """Logits `[rows, vocab]` fp32 are left unchanged; a row's result depends on nothing but that row."""

    name: str

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
        """Per row its token, with log-probabilities where asked; None where its logits are not finite."""
        ...

    def score(
        self, logits: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob | None]:
        """Per row the log-probabilities of a given token and of the best ones; None where it is not finite."""
        ...


def choose_sampler() -> Sampler:
    native = load_native()
    return NumpySampler() if native is None else NativeSampler(native)
