"""How many prompt tokens of a lower class a step may have, where a higher one is promised first tokens. Pure.

Who comes while a step runs waits for its end, and then for the end of the one that it stands in itself. On a CPU a
whole step takes longer than some promise: 256 tokens of the default model 0.7 s. So a step with tokens of a class takes
no more than a SHARE of the tightest TTFT target of the classes above it of which somebody came of late, by the step
times fitted so far. A higher class itself is not bound by that: what it has fills the step first, and the lower one
gets what is left of the bound.

A step has costs of its own (weights are read once), which short steps pay more often. They may be no more than OVERHEAD
of one: a target that asks for shorter steps gets those.
"""

from __future__ import annotations

from common.promised import Promised
from common.sequence import Sequence
from common.step_times import Coefficients, StepShape, chunk_for, seconds_of

SHARE = 1 / 4
OVERHEAD = 1 / 6


class ChunkBudget:
    def __init__(self) -> None:
        self._promised = Promised()

    def arrives(self, seq: Sequence, now: float) -> None:
        self._promised.asked(seq.lane[0], seq.request.ttft_s, now)

    def within(self, seq: Sequence, step_model: Coefficients | None, now: float) -> int | None:
        """Tokens of the step in which `seq` stands, all of it counted; None: as many as there is room for."""
        target_s = self._promised.above(seq.lane[0], now)
        if target_s is None or step_model is None:
            return None
        empty = StepShape(1, seq.num_computed, 0)
        least_s = seconds_of(step_model, empty) / OVERHEAD
        return chunk_for(step_model, empty, max(SHARE * target_s, least_s))
