"""How long a step takes by what stands in it, fitted online. Pure.

    seconds = fixed + per_row · rows + per_context · tokens of context + per_chunk · chunk tokens

The terms are those of a roofline: weights are read once a step, each row costs its small operations, each token of
context its KV bytes, each token of a chunk its arithmetic. No coefficient is below zero, so more work is never said to
take less time. Least squares with old steps forgotten (`MEMORY` steps), by coordinate descent on the normal equations
(Friedman, Hastie, Tibshirani 2010): half a thousand multiplications, every `REFIT` steps and when somebody asks for the
newest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 400
ENOUGH = 16
REST_S, LEAST_LEFT = 10.0, 1 / 16
TELLING = 4  # as many as there are terms
REFIT = 16
SWEEPS = 60
STALL = (
    4.0  # a step that took so many times what was expected was held up by something else, and counts as this
)
RIDGE = 1e-6
_SCALES = (1.0, 16.0, 4096.0, 256.0)  # of the four terms, so that they weigh alike in the descent

Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows`: sequences that stand in it. `context`: tokens before the step's own, over all rows. `chunk`: prompt
    tokens computed in it, those of recomputes too."""

    rows: int
    context: int
    chunk: int


def seconds_of(coefficients: Coefficients, shape: StepShape) -> float:
    fixed, per_row, per_context, per_chunk = coefficients
    return fixed + per_row * shape.rows + per_context * shape.context + per_chunk * shape.chunk


def chunk_for(coefficients: Coefficients, shape: StepShape, seconds: float) -> int | None:
    """The most chunk tokens with which a step of `shape`, its own chunk not counted, ends within `seconds`; None: any
    number does."""
    per_chunk = coefficients[3]
    left_s = seconds - seconds_of(coefficients, StepShape(shape.rows, shape.context, 0))
    if left_s <= 0:
        return 0
    return None if per_chunk <= 0 else int(left_s / per_chunk)


class StepTimes:
    """Of one worker: steps of one model on one machine."""

    def __init__(self) -> None:
        self.observed = 0
        self._products = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4
        self._fit = [0.0] * 4
        self._since_fit = 0
        self._enough = ENOUGH
        self._at: float | None = None  # of the last step
        self.lately: Coefficients | None = None
        """As of at most `REFIT` steps ago, for whoever asks in every step; None while too few steps are known."""

    def begin_with(self, measured: Iterable[tuple[StepShape, float]]) -> None:
        """Steps that were made to tell the terms apart: so few of them are enough to say something."""
        for shape, seconds in measured:
            self.observe(shape, seconds)
        if self.observed >= TELLING:
            self._enough = 0
            self._descend()

    def observe(self, shape: StepShape, seconds: float, now: float | None = None) -> None:
        """`now`: after a rest, what was before it counts less. Steps of a bad minute would else be believed for as long
        as nobody is given to a worker for their sake."""
        if now is not None:
            if self._at is not None and now - self._at > REST_S:
                self._forget(max(LEAST_LEFT, 0.5 ** ((now - self._at) / REST_S)))
            self._at = now
        if self.lately is not None:
            seconds = min(seconds, STALL * seconds_of(self.lately, shape))
        row = [term / scale for term, scale in zip(_terms(shape), _SCALES, strict=True)]
        keep = 1.0 - 1.0 / MEMORY
        for i, left in enumerate(row):
            products = self._products[i]
            for j, right in enumerate(row):
                products[j] = keep * products[j] + left * right
            self._sums[i] = keep * self._sums[i] + left * seconds
        self.observed += 1
        self._since_fit += 1
        if self.observed >= self._enough and self._since_fit >= REFIT:
            self._descend()

    def _forget(self, left: float) -> None:
        self._products = [[left * product for product in row] for row in self._products]
        self._sums = [left * total for total in self._sums]

    @property
    def coefficients(self) -> Coefficients | None:
        """With every step observed so far. None while too few are known to say."""
        if self.observed >= self._enough and self._since_fit:
            self._descend()
        return self.lately

    def seconds(self, shape: StepShape) -> float:
        """0 while too few steps are known to say."""
        fitted = self.coefficients
        return 0.0 if fitted is None else seconds_of(fitted, shape)

    def _descend(self) -> None:
        """Written out, and left where a sweep changes nothing: it is a tenth of what a step costs us otherwise."""
        (p00, p01, p02, p03), (p10, p11, p12, p13), (p20, p21, p22, p23), (p30, p31, p32, p33) = (
            self._products
        )
        own0, own1, own2, own3 = p00 + RIDGE, p11 + RIDGE, p22 + RIDGE, p33 + RIDGE
        s0, s1, s2, s3 = self._sums
        fit = self._fit
        a, b, c, d = fit
        for _ in range(SWEEPS):
            a = max(0.0, (s0 - (p01 * b + p02 * c + p03 * d)) / own0)
            b = max(0.0, (s1 - (p10 * a + p12 * c + p13 * d)) / own1)
            c = max(0.0, (s2 - (p20 * a + p21 * b + p23 * d)) / own2)
            d = max(0.0, (s3 - (p30 * a + p31 * b + p32 * c)) / own3)
            before, fit = fit, [a, b, c, d]
            if fit == before:
                break
        self._fit = fit
        self._since_fit = 0
        fixed, per_row, per_context, per_chunk = (
            value / scale for value, scale in zip(fit, _SCALES, strict=True)
        )
        self.lately = (fixed, per_row, per_context, per_chunk)


def _terms(shape: StepShape) -> tuple[float, float, float, float]:
    return 1.0, float(shape.rows), float(shape.context), float(shape.chunk)
