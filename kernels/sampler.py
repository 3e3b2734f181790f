"""Sampling behind one seam: Triton on a GPU, C where it was built, numpy elsewhere. All give the same tokens."""

from collections.abc import Sequence
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


@runtime_checkable
class SamplesThere(Protocol):
    """A sampler that takes logits where the model left them."""

    def sample_there(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled | None]: ...


def sample_there(sampler: Sampler, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled | None]:
    """As `sample`, of logits on any device: they come down only where the sampler needs that."""
    if isinstance(sampler, SamplesThere):
        return sampler.sample_there(logits, draws)
    return sampler.sample(logits.cpu().numpy(), draws)


def choose_sampler(device: torch.device | None = None) -> Sampler:
    """`device`: where Triton kernels run; None, or a CPU: nowhere."""
    native = load_native()
    host = NumpySampler() if native is None else NativeSampler(native)
    if device is None or device.type != "cuda":
        return host
    from kernels.gpu.sampler import GpuSampler  # nothing of a GPU is imported where there is none

    return GpuSampler(device, host)
