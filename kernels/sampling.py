"""From fp32 logits to tokens and log-probabilities, each row by itself: the rules, and their arithmetic in numpy.

Order: repetition, presence and frequency penalties, logit bias, min-tokens ban, grammar mask, temperature, top-k,
top-p, min-p; then one uniform number picks the first id whose cumulative weight, in id order, exceeds its share of
the whole. Greedy takes the lowest id among the best. So a token is a function of logits, settings, seed and index.

A weight is exp(x - best) as a whole number of units of 2^-44, the exponential a fixed series in float64. Why whole
numbers: their sums are exact, so no order of adding can matter, and the C of `kernels/native/sampling.c`, which
gives the same bits, may add in lanes. What is below 3e-14 of the best weighs nothing. Ids of equal weight come in
their own order, so that what top-k and top-p keep is a function too.

On processors of one kind and one C library the two also give equal log-probabilities (both take `log` from there).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.model_config import MAX_VOCAB
from kernels.philox import uniforms
from kernels.step import SamplingLike, TokenLogprob

GREEDY_BELOW = 1e-5
LOWEST_LOGPROB = -9999.0  # JSON has no -inf
UNIT = 1 << 44
_SORTED_FIRST = 1024

Sampled = tuple[int, TokenLogprob | None]


def in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """As int32. Raises IndexError where one is not an id of the vocabulary."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise IndexError(_outside(int(ids.min()), int(ids.max()), vocab_size))
    return ids.astype(np.int32)


def _outside(least: int, most: int, vocab_size: int) -> str:
    return f"token ids {least} to {most}: the vocabulary has {vocab_size}"


class TokenCounts:
    """Which tokens one sequence has seen, for penalties: distinct ids, and how often each is among its outputs.

    Ids outside the vocabulary raise IndexError here: a worker that takes a prompt over never computes with it, so no
    model has refused them, and C reads and writes where they point.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        ids = np.unique(in_vocabulary([*prompt, *outputs], vocab_size))
        room = min(2 * len(ids) + 16, vocab_size)
        self._ids = np.zeros(room, dtype=np.int32)
        self._outputs = np.zeros(room, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self.vocab_size = vocab_size
        for token_id in outputs:
            self.append(token_id)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> np.ndarray:
        """int32, distinct; the first `len` of them count."""
        return self._ids

    @property
    def outputs(self) -> np.ndarray:
        """int32, per id: how many outputs; 0 is in the prompt only."""
        return self._outputs

    def append(self, token_id: int) -> None:
        """One more output."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(_outside(token_id, token_id, self.vocab_size))
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = min(2 * place, self.vocab_size)
            self._ids = np.resize(self._ids, room)
            self._outputs = np.concatenate([self._outputs, np.zeros(room - place, dtype=np.int32)])
        self._ids[place] = token_id
        self._outputs[place] += 1

    def penalize(self, logits: np.ndarray, sampling: SamplingLike) -> None:
        """In place. Repetition: prompt and outputs; presence and frequency: outputs only, as OpenAI and vLLM do."""
        ids, outputs = self._ids[: len(self)], self._outputs[: len(self)]
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            seen = logits[ids]
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids, counts = ids[outputs > 0], outputs[outputs > 0].astype(np.float32)
            logits[ids] -= np.float32(sampling.frequency_penalty) * counts
            logits[ids] -= np.float32(sampling.presence_penalty)


def needs_counts(sampling: SamplingLike) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


class Draw(NamedTuple):
    """One row to sample. `allowed` is what its grammar allows, a bool mask over the vocabulary; None: no grammar.

    A tuple because one is made per row and step: a frozen dataclass takes four times as long.
    """

    sampling: SamplingLike
    output_index: int
    counts: TokenCounts | None = None
    allowed: np.ndarray | None = None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def bans_ends(self) -> bool:
        """Where a grammar allows nothing but the end, `min_tokens` gives way to it."""
        ends = self.sampling.end_token_ids
        if self.output_index >= self.sampling.min_tokens or not ends:
            return False
        return self.allowed is None or int(self.allowed.sum()) > int(self.allowed[list(ends)].sum())

    @property
    def changes_logits(self) -> bool:
        biased = bool(self.sampling.logit_bias)
        return self.counts is not None or biased or self.bans_ends or self.allowed is not None


class NumpySampler:
    """`Sampler` in numpy, row by row: the reference, and what runs where the extension was not built."""

    name = "numpy"

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
        return sample(logits, draws)

    def score(
        self, logits: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob | None]:
        return [
            logprobs(row, token_id, top) if _is_finite(row) else None
            for row, token_id, top in zip(logits, token_ids, tops, strict=True)
        ]


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | None]:
    """logits `[rows, vocab]` fp32, left unchanged. Per row its token, with log-probabilities where asked; None
    where the logits are not finite (NaN, or a best one that is no number): an overflow must not become a token."""
    assert logits.shape[1] <= MAX_VOCAB
    numbers = uniforms(
        [draw.sampling.seed for draw in draws],
        [draw.output_index for draw in draws],
        [draw.sampling.child for draw in draws],
    )
    return [
        _sample_row(row, draw, number) if _is_finite(row) else None
        for row, draw, number in zip(logits, draws, numbers.tolist(), strict=True)
    ]


def _is_finite(row: np.ndarray) -> bool:
    return bool(np.isfinite(row.max()))  # NaN wins a max


def _sample_row(logits: np.ndarray, draw: Draw, number: float) -> Sampled:
    adjusted = adjust(logits, draw) if draw.changes_logits else logits
    # argmax gives the first of equals
    token_id = int(np.argmax(adjusted)) if draw.greedy else pick(adjusted, draw.sampling, number)
    asked = draw.sampling.logprobs
    return token_id, None if asked is None else logprobs(logits, token_id, asked)


def adjust(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Penalties, bias and masks; a new array."""
    logits = logits.copy()
    if draw.counts is not None:
        draw.counts.penalize(logits, draw.sampling)
    for token_id, bias in draw.sampling.logit_bias:
        logits[token_id] += np.float32(bias)
    if draw.bans_ends:
        logits[list(draw.sampling.end_token_ids)] = -np.inf
    if draw.allowed is not None:
        np.copyto(logits, -np.inf, where=~draw.allowed)
    return logits


def pick(logits: np.ndarray, sampling: SamplingLike, number: float) -> int:
    """The token that `number`, a multiple of 2^-53 in [0, 1), falls on, after temperature, top-k, top-p and min-p."""
    with np.errstate(over="ignore"):
        scaled = logits / np.float32(sampling.temperature)
    if not np.isfinite(scaled.max()):  # nothing to weigh: an overflow, or all is forbidden
        return int(np.argmax(logits))
    weights = keep(weigh(scaled), sampling)
    target = (int(number * 2**53) * int(weights.sum())) >> 53
    return int(np.searchsorted(np.cumsum(weights), target, side="right"))


LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = (
    6.93147180369123816490e-01,
    1.90821492927058770002e-10,
)  # 32 bits, so that n * high is exact
TO_WHOLE = 1.5 * 2.0**52  # what is added to it is rounded to a whole number
TO_UNITS = np.float64(1.5 * 2.0**8)  # … to a multiple of 2^-44, and its bits then count them
LOWEST_EXPONENT = -40.0  # weighs nothing, as does minus infinity
SERIES = [1.0 / math.factorial(k) for k in range(11, -1, -1)]  # of exp up to |ln 2| / 2, to 7e-15


def weigh(scaled: np.ndarray) -> np.ndarray:
    """fp32 to exp(x - best) in units of 2^-44, int64. Each operation is rounded once, as in C."""
    y = scaled.astype(np.float64)
    y -= y.max()
    np.maximum(y, LOWEST_EXPONENT, out=y)
    shifted = y * LOG2_E + TO_WHOLE
    n = shifted - TO_WHOLE
    y -= n * LN2_HIGH
    y -= n * LN2_LOW
    series = np.full_like(y, SERIES[0])
    for coefficient in SERIES[1:]:
        series *= y
        series += coefficient
    power = ((shifted.view(np.int64) + 1023) << 52).view(np.float64)  # 2^n
    weights: np.ndarray = (series * power + TO_UNITS).view(np.int64) - TO_UNITS.view(np.int64)
    return weights


def keep(weights: np.ndarray, sampling: SamplingLike) -> np.ndarray:
    """Zero for what top-k, top-p and min-p take away. The best is always left."""
    if 0 < sampling.top_k < len(weights):
        weights = _only(weights, _best(weights, sampling.top_k))
    if sampling.top_p < 1.0:
        weights = _only(weights, _nucleus(weights, sampling.top_p))
    if sampling.min_p > 0.0:
        weights = np.where(weights >= min(math.ceil(sampling.min_p * UNIT), UNIT), weights, 0)
    return weights


def _only(weights: np.ndarray, ids: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest, best first, equals by id."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest best ids whose weights reach `top_p` of the whole, the one that crosses included."""
    wanted = math.ceil(top_p * float(weights.sum()))
    # A sort of a whole vocabulary takes 4 ms; the nucleus is often among the first thousand.
    ids = _best(weights, min(_SORTED_FIRST, len(weights)))
    if weights[ids].sum() < wanted:
        ids = np.argsort(-weights, kind="stable")
    reached = np.searchsorted(np.cumsum(weights[ids]), wanted, side="left")
    return ids[: int(reached) + 1]


def logprobs(logits: np.ndarray, token_id: int, top: int) -> TokenLogprob:
    """Log-softmax of the model's own finite logits (before penalties and temperature, as vLLM reports by default)."""
    normalizer = float(logits.max()) + math.log(float(weigh(logits).sum()) / UNIT)

    def value(index: int) -> float:
        return max(float(logits[index]) - normalizer, LOWEST_LOGPROB)

    ids = _best(logits, min(top, len(logits))) if top else ()
    return TokenLogprob(token_id, value(token_id), tuple((int(index), value(int(index))) for index in ids))
