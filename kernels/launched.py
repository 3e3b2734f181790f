"""A step that was launched, and how it becomes a result: what the device is still to do, and what the host does then.

The next step may be launched before this one's result is asked for, and may take tokens from it that the host has not
seen. So nothing here may lie where the next step writes: what comes down has memory of its own, in the stream before
the next step's first kernel.

Once the result is there, all that the step wrote is: blocks may then be copied by other streams, and be given away.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernels.prompt_scores import PromptScores
from kernels.sampler import Drawing
from kernels.sampling import TokenCounts
from kernels.step import StepResult, TokenLogprob
from kernels.stream import StreamPoint

NOT_FINITE = "its logits are not finite"
NO_TOKEN_BEFORE = "the step before gave it no token"


class LaunchedStep:
    """Of a `ModelRunner`, and its thread's. `slots`, `ends` and `samples` `[rows]` are the batch's."""

    def __init__(
        self,
        slots: np.ndarray,
        ends: np.ndarray,
        samples: np.ndarray,
        *,
        over: StreamPoint,
        drawing: Drawing | None = None,
        drawn_rows: tuple[int, ...] = (),
        scores: PromptScores | None = None,
        counting: Mapping[int, TokenCounts] | None = None,
        faults: Mapping[int, str] | None = None,
        follows: Mapping[int, int] | None = None,
        before: LaunchedStep | None = None,
    ) -> None:
        """`drawing` is of `drawn_rows`; `faults` are known already; `counting` is told, by row, of what is sampled.
        `follows`: by row, the row of `before` whose token it takes."""
        self.slots = slots
        self.ends = ends
        self.samples = samples
        self._over = over
        self._drawing = drawing
        self._drawn_rows = drawn_rows
        self._scores = scores
        self._counting = counting or {}
        self._faults = faults or {}
        self._follows = follows or {}
        self._before = before if self._follows else None
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for it. In the order of launches: a row whose token was to come from a step without a result is a
        fault, as is one whose row there gave none."""
        if self._result is None:
            self._over.wait()
            result = self._taken()
            self._count(result)
            self._result = result
            self._before = self._drawing = self._scores = None
        return self._result

    def discard(self) -> None:
        """Waits until the device is through with it; what it came to is nobody's."""
        self._over.wait()

    def gave(self, row: int) -> bool:
        return self._result is not None and bool(self._result.ids[row])

    def _taken(self) -> StepResult:
        ids: list[tuple[int, ...]] = [()] * len(self.slots)
        logprobs: list[tuple[TokenLogprob, ...] | None] = [None] * len(self.slots)
        faults = dict(self._faults)
        sampled = [] if self._drawing is None else self._drawing.take()
        for row, one in zip(self._drawn_rows, sampled, strict=True):
            if one is None:
                faults[row] = NOT_FINITE
            else:
                ids[row] = (one[0],)
                logprobs[row] = None if one[1] is None else (one[1],)
        prompts = {}
        for row, said in ({} if self._scores is None else self._scores.take()).items():
            if said is None:
                faults[row] = NOT_FINITE
            elif said:
                prompts[row] = said
        for row, its_row_before in self._follows.items():
            if self._before is None or not self._before.gave(its_row_before):
                ids[row], logprobs[row], faults[row] = (), None, NO_TOKEN_BEFORE
        return StepResult(tuple(ids), tuple(logprobs), prompts, faults)

    def _count(self, result: StepResult) -> None:
        """The last thing that a step does, and nothing in it raises: one that does is run again, row by row."""
        for row, counts in self._counting.items():
            for token_id in result.ids[row]:
                counts.append(token_id)
