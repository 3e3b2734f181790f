"""How many tokens of local prefill a decode step may have beside the answers in it. Pure.

Every token of a chunk makes the step longer, and with it the gap of each answer in it. So the budget follows the
tightest ITL target among them: as many tokens as let the step end within `CAUTION` of it, by the step times fitted so
far. Whose transfer is accepted counts too: it may become whole while the step runs, and its first gap is what is left
of that step and one more; the chunk in that one is shorter by what it waited, and where a step's blocks or fewer are
missing, the chunk in this one by what the next will take at least. So do targets of classes above those that
compute here, of which somebody came of late: who comes next waits for this step. Where nobody has a target, or too few
steps are known, it is what `max_num_batched_tokens` leaves.

Step times are fitted, and steps differ: beside busy neighbours one takes half as long again as the last. So what is
aimed at follows what came of it: LESS of it after a step that took longer than the target, and MORE after each that
did not, which lets one in two hundred be late: an answer has as many gaps as it has tokens.

Local prefill must go on too: `MIN_CHUNK` tokens are in every step that ends within the target with them, be it within
`CAUTION` or not, and in every `PATIENCE`-th step whatever the target says (what stands in it may be too much for its
target without any chunk). So who computes alone here gets MIN_CHUNK · steps / PATIENCE tokens at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from common.lifecycle import Phase
from common.promised import Promised
from common.sequence import Sequence
from common.step_times import Coefficients, StepShape, chunk_for, seconds_of

MIN_CHUNK = 16
PATIENCE = 8
CAUTION = 0.9
"""Of a target is aimed at: the rest is for what the fit does not see, and for what lies between two steps."""
LESS, MORE = 0.9, 1.0005
LEAST_AIM = 0.5


def tightest_itl_s(seqs: Iterable[Sequence]) -> float | None:
    return min((seq.request.itl_s for seq in seqs if seq.request.itl_s is not None), default=None)


def _left_s(joined: Iterable[Sequence], now: float) -> float | None:
    """Until the first of their ITL targets is over."""
    lefts_s = (
        max(0.0, seq.request.itl_s - seq.life.seconds_in(Phase.DECODE_READY, now))
        for seq in joined
        if seq.request.itl_s is not None
    )
    return min(lefts_s, default=None)


def _left_beside(
    soon: Iterable[Sequence],
    decoding: Seq[Sequence],
    prefilling: Seq[Sequence],
    step_model: Coefficients | None,
) -> float | None:
    """Of the first of their ITL targets, when the step after this one is in it as well; None where two cannot be."""
    itl_s = tightest_itl_s(soon)
    if itl_s is None or step_model is None:
        return None
    next_s = seconds_of(step_model, _shape(decoding, prefilling, 1, MIN_CHUNK))
    return itl_s - next_s if itl_s >= 2 * next_s else None


def _shape(decoding: Seq[Sequence], prefilling: Seq[Sequence], more: int = 0, chunk: int = 0) -> StepShape:
    """Of a step of these and so many rows more."""
    context = sum(seq.num_computed for seq in decoding) + sum(seq.num_computed for seq in prefilling)
    return StepShape(len(decoding) + len(prefilling) + more, context, chunk)


class ChunkBudget:
    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._steps_without = 0
        self._promised = Promised()
        self._aim = 1.0
        self._target_s: float | None = None  # of the last step with a chunk

    def arrives(self, seq: Sequence, now: float) -> None:
        """It is new here, or asks for room again."""
        self._promised.asked(seq.lane[0], seq.request.itl_s, now)

    def tokens(
        self,
        decoding: Seq[Sequence],
        prefilling: Seq[Sequence],
        step_model: Coefficients | None,
        joining: Iterable[Sequence] = (),
        joined: Iterable[Sequence] = (),
        soon: Iterable[Sequence] = (),
        now: float = 0.0,
    ) -> int:
        """Of the next step, whose rows are `decoding` and chunks of `prefilling`, of which there is one at least.
        `joining`: those that may have to wait for its end. `joined`: of `decoding`, those whose first step this is:
        they have waited for it since their first token. `soon`: of `joining`, those that will wait for most of it."""
        most = max(self._max_tokens - len(decoding), MIN_CHUNK)
        soon_s = _left_beside(soon, decoding, prefilling, step_model)
        guests_s = self._promised.above(min(seq.lane[0] for seq in prefilling), now)
        itls_s = (tightest_itl_s(decoding), tightest_itl_s(joining), guests_s, soon_s, _left_s(joined, now))
        itl_s = min((one for one in itls_s if one is not None), default=None)
        budget = (
            most
            if itl_s is None or step_model is None
            else self._within(itl_s, decoding, prefilling, step_model)
        )
        self._target_s = itl_s
        self._steps_without = 0 if budget else self._steps_without + 1
        return min(budget, most)

    def took(self, step_s: float) -> None:
        """The last step with a chunk did."""
        if self._target_s is not None:
            self._aim = max(LEAST_AIM, min(1.0, self._aim * (LESS if step_s > self._target_s else MORE)))

    def _within(
        self, itl_s: float, decoding: Seq[Sequence], prefilling: Seq[Sequence], step_model: Coefficients
    ) -> int:
        shape = _shape(decoding, prefilling)
        fits = chunk_for(step_model, shape, self._aim * CAUTION * itl_s)
        if fits is None:
            return self._max_tokens
        if fits >= MIN_CHUNK:
            return fits
        least = chunk_for(step_model, shape, itl_s)
        in_time = least is None or least >= MIN_CHUNK
        return MIN_CHUNK if in_time or self._steps_without + 1 >= PATIENCE else 0
