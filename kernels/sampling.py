"""From fp32 logits to tokens and log-probabilities, each row by itself.

Order: repetition, presence and frequency penalties, logit bias, min-tokens ban, grammar mask, temperature, top-k,
top-p, min-p; then one uniform number picks the first id whose cumulative probability, in id order and float64,
exceeds it. Greedy takes the lowest id among the best. So a token is a function of logits, settings, seed and index.

Why numpy row by row: the length of a row is the only thing its sums then depend on. Ties in top-k and top-p go to
the lower id, so that the kept set is a function too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.philox import uniforms
from kernels.step import SamplingLike, TokenLogprob

GREEDY_BELOW = 1e-5
LOWEST_LOGPROB = -9999.0  # JSON has no -inf
_SORTED_FIRST = 1024


class TokenCounts:
    """Which tokens one sequence has seen, for penalties: its prompt as a set, its outputs with counts."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        self._outputs = np.zeros(vocab_size, dtype=np.int32)
        np.add.at(self._outputs, np.asarray(outputs, dtype=np.int64), 1)
        self._seen = np.zeros(vocab_size, dtype=bool)
        self._seen[np.asarray(prompt, dtype=np.int64)] = True
        self._seen[np.asarray(outputs, dtype=np.int64)] = True

    def append(self, token_id: int) -> None:
        self._outputs[token_id] += 1
        self._seen[token_id] = True

    def penalize(self, logits: np.ndarray, sampling: SamplingLike) -> None:
        """In place. Repetition: prompt and outputs; presence and frequency: outputs only, as OpenAI and vLLM do."""
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            ids = np.flatnonzero(self._seen)
            seen = logits[ids]
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids = np.flatnonzero(self._outputs)
            counts = self._outputs[ids].astype(np.float32)
            logits[ids] -= np.float32(sampling.frequency_penalty) * counts
            logits[ids] -= np.float32(sampling.presence_penalty)


def needs_counts(sampling: SamplingLike) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample. `allowed` is what its grammar allows, a bool mask over the vocabulary; None: no grammar."""

    sampling: SamplingLike
    output_index: int
    counts: TokenCounts | None = None
    allowed: np.ndarray | None = field(default=None)

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


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> list[tuple[int, TokenLogprob | None]]:
    """logits `[rows, vocab]` fp32, left unchanged. One token per row, with log-probabilities where asked."""
    drawn = [row for row, draw in enumerate(draws) if not draw.greedy]
    numbers = uniforms(
        [draws[row].sampling.seed for row in drawn],
        [draws[row].output_index for row in drawn],
        [draws[row].sampling.child for row in drawn],
    )
    number_of = dict(zip(drawn, numbers.tolist(), strict=True))
    results: list[tuple[int, TokenLogprob | None]] = []
    for row, draw in enumerate(draws):
        adjusted = adjust(logits[row], draw) if draw.changes_logits else logits[row]
        if draw.greedy:
            token_id = int(np.argmax(adjusted))  # the first of equals
        else:
            token_id = pick(adjusted, draw.sampling, number_of[row])
        asked = draw.sampling.logprobs
        results.append((token_id, None if asked is None else logprobs(logits[row], token_id, asked)))
    return results


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
    """The token that `number` in [0, 1) falls on, after temperature, top-k, top-p and min-p."""
    scaled = logits / np.float32(sampling.temperature)
    best = scaled.max()
    if not np.isfinite(best):  # nothing to weigh: an overflow, or a row that is lost anyway
        return int(np.argmax(logits))
    weights = np.exp((scaled - best).astype(np.float64))
    ids = keep(scaled, weights, sampling)
    if ids is not None:
        weights = weights[ids]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    # number < 1, but its product with the sum can round up to the sum
    place = min(place, int(np.flatnonzero(weights)[-1])) if place >= len(weights) else place
    return place if ids is None else int(ids[place])


def keep(scaled: np.ndarray, weights: np.ndarray, sampling: SamplingLike) -> np.ndarray | None:
    """Ids that top-k, top-p and min-p leave, ascending; None where they leave all. The best is always left."""
    ids: np.ndarray | None = None
    if 0 < sampling.top_k < len(scaled):
        ids = _best(scaled, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = _nucleus(scaled, weights, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        ids = np.arange(len(scaled)) if ids is None else ids
        ids = ids[weights[ids] >= sampling.min_p]  # the best has weight 1
    return None if ids is None else np.sort(ids)


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest, best first, equals by id."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])


def _nucleus(scaled: np.ndarray, weights: np.ndarray, ids: np.ndarray | None, top_p: float) -> np.ndarray:
    """The fewest best ids whose weights reach `top_p` of what top-k left, the one that crosses included."""
    total = weights.sum() if ids is None else weights[np.sort(ids)].sum()
    wanted = top_p * total
    if ids is None:
        # A sort of a whole vocabulary takes 4 ms; the nucleus is nearly always among the first thousand.
        ids = _best(scaled, min(_SORTED_FIRST, len(scaled)))
        if weights[ids].cumsum()[-1] < wanted:
            ids = np.argsort(-scaled, kind="stable")
    reached = np.searchsorted(weights[ids].cumsum(), wanted, side="left")
    return ids[: int(reached) + 1]


def logprobs(logits: np.ndarray, token_id: int, top: int) -> TokenLogprob:
    """Log-softmax of the model's own logits (before penalties and temperature, as vLLM reports by default)."""
    wide = logits.astype(np.float64)
    best = wide.max()
    broken = not np.isfinite(best)  # an overflow: there is no distribution to speak of
    normalizer = 0.0 if broken else best + np.log(np.exp(wide - best).sum())

    def value(index: int) -> float:
        return LOWEST_LOGPROB if broken else max(float(wide[index] - normalizer), LOWEST_LOGPROB)

    ids = _best(logits, min(top, len(logits))) if top else ()
    return TokenLogprob(token_id, value(token_id), tuple((int(index), value(int(index))) for index in ids))
