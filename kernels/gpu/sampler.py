"""`Sampler` on a device: ids are drawn there and come down alone, but for rows that ask for log-probabilities.

Those few rows' logits come down too, and the host's sampler says what it says everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.gpu.sampling import sample_on_device
from kernels.gpu.sampling_table import SamplingTable
from kernels.sampling import Draw, Sampled
from kernels.step import TokenLogprob

if TYPE_CHECKING:
    from kernels.sampler import Sampler


class GpuSampler:
    """The results of `host`, which it has for log-probabilities. Belongs to one thread at a time, as that does."""

    def __init__(self, device: torch.device, host: Sampler) -> None:
        self._device = device
        self._host = host
        self.name = f"triton, {host.name} for log-probabilities"

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
        return self.sample_there(torch.from_numpy(logits.copy()).to(self._device), draws)

    def sample_there(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled | None]:
        """logits `[rows, vocab]` fp32 on the device. Raises IndexError as `SamplingTable.from_draws`."""
        assert len(draws) == len(logits)
        table = SamplingTable.from_draws(draws, logits.shape[1], logits.device)
        ids = sample_on_device(logits, table).tolist()
        asked = [
            row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None and ids[row] >= 0
        ]
        said: dict[int, TokenLogprob | None] = {}
        if asked:
            tops = [draws[row].sampling.logprobs or 0 for row in asked]
            scores = self._host.score(logits[asked].cpu().numpy(), [ids[row] for row in asked], tops)
            said = dict(zip(asked, scores, strict=True))
        return [None if token_id < 0 else (token_id, said.get(row)) for row, token_id in enumerate(ids)]

    def score(
        self, logits: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob | None]:
        return self._host.score(logits, token_ids, tops)
