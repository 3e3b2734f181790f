"""How many tokens of local prefill a decode step may have beside the answers in it. Pure.

Every token of a chunk makes the step longer, and with it the gap of each answer in it. So the budget follows the
tightest ITL target among them: as many tokens as let the step end within `CAUTION` of it, by the step times fitted so
far. Where nobody in the step has a target, or too few steps are known, it is what `max_num_batched_tokens` leaves.

Local prefill must go on too: `MIN_CHUNK` tokens are in every step that ends within the target with them, be it within
`CAUTION` or not, and in every `PATIENCE`-th step whatever the target says (what stands in it may be too much for its
target without any chunk). So who computes alone here gets MIN_CHUNK · steps / PATIENCE tokens at least.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from common.sequence import Sequence
from common.step_times import Coefficients, StepShape, chunk_for

MIN_CHUNK = 16
PATIENCE = 8
CAUTION = 0.9
"""Of a target is aimed at: the rest is for what the fit does not see, and for what lies between two steps."""


def tightest_itl_s(decoding: Seq[Sequence]) -> float | None:
    targets = [seq.request.itl_s for seq in decoding if seq.request.itl_s is not None]
    return min(targets, default=None)


class ChunkBudget:
    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._steps_without = 0

    def tokens(
        self, decoding: Seq[Sequence], prefilling: Seq[Sequence], step_model: Coefficients | None
    ) -> int:
        """Of the next step, whose rows are `decoding` and chunks of `prefilling`, of which there is one at least."""
        most = max(self._max_tokens - len(decoding), MIN_CHUNK)
        itl_s = tightest_itl_s(decoding)
        budget = (
            most
            if itl_s is None or step_model is None
            else self._within(itl_s, decoding, prefilling, step_model)
        )
        self._steps_without = 0 if budget else self._steps_without + 1
        return min(budget, most)

    def _within(
        self, itl_s: float, decoding: Seq[Sequence], prefilling: Seq[Sequence], step_model: Coefficients
    ) -> int:
        rows = len(decoding) + len(prefilling)
        context = sum(seq.num_computed for seq in decoding) + sum(seq.num_computed for seq in prefilling)
        shape = StepShape(rows, context, 0)
        fits = chunk_for(step_model, shape, CAUTION * itl_s)
        if fits is None:
            return self._max_tokens
        if fits >= MIN_CHUNK:
            return fits
        least = chunk_for(step_model, shape, itl_s)
        in_time = least is None or least >= MIN_CHUNK
        return MIN_CHUNK if in_time or self._steps_without + 1 >= PATIENCE else 0
