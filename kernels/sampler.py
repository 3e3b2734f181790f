"""Sampling behind one seam: Triton on a GPU, C where it was built, numpy elsewhere. All give the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

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


class Drawing(Protocol):
    """Tokens that are being drawn."""

    @property
    def ids(self) -> torch.Tensor | None:
        """int32 `[rows]` where the logits are: each row's token, or -1. None where only the host has them."""
        ...

    def take(self) -> list[Sampled | None]:
        """As `Sampler.sample` says it. Where there is a stream, to be asked when the device has come past it."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """By the host, at once."""

    sampled: list[Sampled | None]

    @property
    def ids(self) -> None:
        return None

    def take(self) -> list[Sampled | None]:
        return self.sampled


@runtime_checkable
class DrawsThere(Protocol):
    """A sampler that takes logits where the model left them, and waits for nothing."""

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> Drawing: ...


def draw(sampler: Sampler, logits: torch.Tensor, draws: Sequence[Draw]) -> Drawing:
    """As `sample`, of logits on any device: they come down only where the sampler needs that."""
    if isinstance(sampler, DrawsThere):
        return sampler.draw(logits, draws)
    return Drawn(sampler.sample(logits.cpu().numpy(), draws))


def choose_sampler(device: torch.device | None = None) -> Sampler:
    """`device`: where Triton kernels run, a CPU in their interpreter; None: nowhere."""
    native = load_native()
    host = NumpySampler() if native is None else NativeSampler(native)
    if device is None:
        return host
    from kernels.gpu.sampler import GpuSampler  # nothing of a GPU is imported where there is none

    return GpuSampler(device, host)
