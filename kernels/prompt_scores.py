"""Log-probabilities of prompt tokens: the output head over a step's prompt positions, a slice of rows at a time.

Position p says how likely token p + 1 is, which the slot knows even where the chunk ends at p. A chunk of 512 tokens
times a vocabulary of 49,152 would be 100 MB of fp32 logits, hence slices; the head gives a row the same bits in any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.model import CausalModel
from kernels.sampler import Sampler
from kernels.step import StepLayout, TokenLogprob
from kernels.stream import send_up

SLICE_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptToScore:
    """A slot's prompt whose tokens from index `first` on are still to be scored, each with the `top` best."""

    tokens: Sequence[int]
    first: int
    top: int

    def targets(self, start: int, end: int) -> range:
        """Indices of the tokens that computing positions `start` to `end` - 1 scores."""
        return range(max(start + 1, self.first), min(end + 1, len(self.tokens)))


class PromptScores:
    """Of one step, whose rows' hidden states are copied here; the head and the host's part come when they are asked
    for. Then the next step may be in the stream, and is waited for: few ask for these, and their logits are large."""

    def __init__(
        self,
        model: CausalModel,
        sampler: Sampler,
        hidden: torch.Tensor,
        step: StepLayout,
        prompts: Mapping[int, PromptToScore],
    ) -> None:
        """hidden `[tokens, hidden]` of the step; `prompts` by row."""
        self._model = model
        self._sampler = sampler
        self._rows = tuple(prompts)
        self._wanted: list[tuple[int, int, int]] = []  # row, token, best ones
        places: list[int] = []
        for row, prompt in prompts.items():
            start, count = int(step.starts[row]), int(step.counts[row])
            for index in prompt.targets(start, start + count):
                self._wanted.append((row, prompt.tokens[index], prompt.top))
                places.append(int(step.firsts[row]) + index - 1 - start)
        self._hidden = hidden.index_select(0, send_up(np.array(places, dtype=np.int64), hidden.device))

    def take(self) -> dict[int, tuple[TokenLogprob, ...] | None]:
        """Per row one entry for each target, in order; None where the model's logits are not finite: an overflow must
        not become a probability."""
        said: dict[int, list[TokenLogprob]] = {row: [] for row in self._rows}
        broken: set[int] = set()
        for at in range(0, len(self._wanted), SLICE_ROWS):
            part = self._wanted[at : at + SLICE_ROWS]
            with torch.inference_mode():
                logits = self._model.logits(self._hidden[at : at + SLICE_ROWS]).cpu().numpy()
            token_ids, tops = [token_id for _, token_id, _ in part], [top for _, _, top in part]
            for (row, *_), scored in zip(part, self._sampler.score(logits, token_ids, tops), strict=True):
                if scored is None:
                    broken.add(row)
                else:
                    said[row].append(scored)
        return {row: None if row in broken else tuple(of_row) for row, of_row in said.items()}
