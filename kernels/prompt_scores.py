"""Log-probabilities of prompt tokens: the output head over a step's prompt positions, a slice of rows at a time.

Position p says how likely token p + 1 is, which the slot knows even where the chunk ends at p. A chunk of 512 tokens
times a vocabulary of 49,152 would be 100 MB of fp32 logits, hence slices; the head gives a row the same bits in any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.model import CausalModel
from kernels.sampler import Sampler
from kernels.step import TokenLogprob

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


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """A row of a step: where its tokens begin among the step's, and the positions they have."""

    prompt: PromptToScore
    place: int
    start: int
    end: int


def score(
    model: CausalModel, sampler: Sampler, hidden: torch.Tensor, rows: Sequence[ScoringRow]
) -> list[tuple[TokenLogprob, ...] | None]:
    """hidden `[tokens, hidden]` of the step. Per row one entry for each target, in order; None where the model's
    logits are not finite: an overflow must not become a probability."""
    wanted = [
        (number, row.place + index - 1 - row.start, row.prompt.tokens[index], row.prompt.top)
        for number, row in enumerate(rows)
        for index in row.prompt.targets(row.start, row.end)
    ]
    said: list[list[TokenLogprob]] = [[] for _ in rows]
    broken = [False] * len(rows)
    for at in range(0, len(wanted), SLICE_ROWS):
        part = wanted[at : at + SLICE_ROWS]
        places = torch.tensor([place for _, place, _, _ in part], device=hidden.device)
        logits = model.logits(hidden[places]).cpu().numpy()
        token_ids, tops = [token_id for _, _, token_id, _ in part], [top for _, _, _, top in part]
        for (number, *_), scored in zip(part, sampler.score(logits, token_ids, tops), strict=True):
            if scored is None:
                broken[number] = True
            else:
                said[number].append(scored)
    return [None if bad else tuple(row) for bad, row in zip(broken, said, strict=True)]
