"""`Sampler` on a device: ids are drawn there and come down alone, but for rows that ask for log-probabilities.

Those few rows' logits come down too, and the host's sampler says what it says everywhere. All of it is put into the
stream and waited for by whoever wants the tokens: the next step may be launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.gpu.sampling import sample_on_device
from kernels.gpu.sampling_table import SamplingTable
from kernels.sampling import Draw, Sampled
from kernels.step import TokenLogprob
from kernels.stream import StreamPoint, bring_down, send_up

if TYPE_CHECKING:
    from kernels.sampler import Sampler


@dataclass(frozen=True, slots=True)
class DrawingThere:
    """`Drawing` on a device. `here` are the ids on their way down, `told` the logits `[asked rows, vocab]` of `asked`,
    which says by row how many of the best ones are to be named."""

    ids: torch.Tensor
    here: torch.Tensor
    asked: dict[int, int]
    told: torch.Tensor | None
    host: Sampler

    def take(self) -> list[Sampled | None]:
        ids: list[int] = self.here.tolist()
        said: dict[int, TokenLogprob | None] = {}
        if self.told is not None:
            drawn = [place for place, row in enumerate(self.asked) if ids[row] >= 0]
            rows = [row for row in self.asked if ids[row] >= 0]
            tops = [self.asked[row] for row in rows]
            scores = self.host.score(self.told.numpy()[drawn], [ids[row] for row in rows], tops)
            said = dict(zip(rows, scores, strict=True))
        return [None if token_id < 0 else (token_id, said.get(row)) for row, token_id in enumerate(ids)]


class GpuSampler:
    """The results of `host`, which it has for log-probabilities. Belongs to one thread at a time, as that does."""

    def __init__(self, device: torch.device, host: Sampler) -> None:
        self._device = device
        self._host = host
        self.name = f"triton, {host.name} for log-probabilities"

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
        drawing = self.draw(torch.from_numpy(logits.copy()).to(self._device), draws)
        StreamPoint(self._device).wait()
        return drawing.take()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> DrawingThere:
        """logits `[rows, vocab]` fp32 on the device. Raises IndexError as `SamplingTable.from_draws`."""
        assert len(draws) == len(logits)
        table = SamplingTable.from_draws(draws, logits.shape[1], logits.device)
        ids = sample_on_device(logits, table)
        asked = {
            row: draw.sampling.logprobs
            for row, draw in enumerate(draws)
            if draw.sampling.logprobs is not None
        }
        told = None
        if asked:
            rows = send_up(np.fromiter(asked, dtype=np.int64), logits.device)
            told = bring_down(logits.index_select(0, rows))
        return DrawingThere(ids, bring_down(ids), asked, told, self._host)

    def score(
        self, logits: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob | None]:
        return self._host.score(logits, token_ids, tops)
