"""The sampler against a plain reference written from the rules, one row at a time, without any of its shortcuts."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from kernels.philox import uniforms
from kernels.sampling import Draw, TokenCounts, adjust, logprobs, needs_counts, pick, sample
from tests.kernels.driving import Sampling


def _reference_weights(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Final unnormalised probabilities over the vocabulary, by loops and full sorts."""
    x = (logits / np.float32(s.temperature)).astype(np.float64)
    weights = np.exp(x - x.max())
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if 0 < s.top_k < len(x):
        order = order[: s.top_k]
    if s.top_p < 1.0:
        total, reached, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            reached += weights[i]
            if reached >= s.top_p * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= s.min_p * weights.max()]
    final = np.zeros(len(x))
    final[order] = weights[order]
    return final


def _reference_pick(logits: np.ndarray, s: Sampling, number: float) -> int:
    weights = _reference_weights(logits, s)
    reached, total = 0.0, weights.sum()
    for i, weight in enumerate(weights):
        reached += weight
        if reached > number * total:
            return i
    return int(np.flatnonzero(weights)[-1])


_SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.parametrize("settings", _SETTINGS)
@pytest.mark.parametrize("vocab", [50, 4000])
def test_draws_equal_the_plain_reference(vocab: int, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((60, vocab)) * 3).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # many ties
    draws = [
        Draw(Sampling(**{"temperature": 1.0, "seed": row, **settings}), output_index=row) for row in range(60)
    ]
    numbers = uniforms([d.sampling.seed for d in draws], list(range(60)), [0] * 60)
    wanted = [_reference_pick(logits[row], draws[row].sampling, numbers[row]) for row in range(60)]  # type: ignore[arg-type]
    assert [token for token, _ in sample(logits, draws)] == wanted


_BIAS = ((3, 2.5), (7, -100.0), (11, -1.5))
_ENDS = {"min_tokens": 6, "end_token_ids": (0, 5)}
_PROMPT, _OUTPUTS = [1, 2, 7, 3, 3], [7, 9, 7, 20, 7]
_AT_ONE_POSITION: list[dict[str, Any]] = [
    {},
    {"top_k": 12},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 0.7, "min_p": 0.02},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.6},
    {"logit_bias": _BIAS},
    _ENDS,
    {"top_k": 20, "top_p": 0.9, "min_p": 0.03},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3, "top_p": 0.95},
    {
        **_ENDS,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.2,
        "logit_bias": _BIAS,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
    },
]


def _reference_logits(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Penalties, bias and ban by the rules, id by id, in float64; five tokens are out."""
    adjusted = []
    for i, x in enumerate(logits.tolist()):
        times = _OUTPUTS.count(i)
        if times or i in _PROMPT:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        x -= s.presence_penalty * (times > 0) + s.frequency_penalty * times
        x += dict(s.logit_bias).get(i, 0.0)
        adjusted.append(-math.inf if i in s.end_token_ids and len(_OUTPUTS) < s.min_tokens else x)
    return np.array(adjusted)


@pytest.mark.parametrize("settings", _AT_ONE_POSITION, ids=lambda s: "+".join(s) or "plain")
def test_20_000_draws_at_one_position(settings: dict[str, Any]) -> None:
    logits = (np.random.default_rng(1).standard_normal(40) * 1.5).astype(np.float32)
    wanted = Sampling(**{"temperature": 1.0, **settings})
    counts = TokenCounts(40, _PROMPT, _OUTPUTS) if needs_counts(wanted) else None
    draws = [Draw(dataclasses.replace(wanted, seed=seed), 5, counts) for seed in range(20_000)]
    tokens = [token for token, _ in sample(np.broadcast_to(logits, (20_000, 40)), draws)]
    weights = _reference_weights(_reference_logits(logits, wanted), wanted)
    assert _p_value(tokens, weights) > 1e-4
    if settings:
        assert _p_value(tokens, _reference_weights(logits, Sampling(temperature=1.0))) < 1e-9, (
            "it does nothing"
        )


def _p_value(tokens: list[int], weights: np.ndarray) -> float:
    """Chi-square of draws against unnormalised probabilities; those expected less than five times are one class.
    A draw of the impossible is no chance at all."""
    found, wanted = np.bincount(tokens, minlength=len(weights)), weights / weights.sum() * len(tokens)
    if found[weights == 0].any():
        return 0.0
    rare = wanted < 5
    found = np.append(found[~rare], found[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] == 0:
        found, wanted = found[:-1], wanted[:-1]
    return float(chisquare(found, wanted).pvalue)


def test_a_number_on_the_edge_never_falls_on_an_impossible_token() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], dtype=np.float32)
    sampling = Sampling(temperature=1.0)
    assert [pick(logits, sampling, number) for number in (0.0, 0.5, 1 - 2.0**-53)] == [1, 3, 3]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((2, 30), dtype=np.float32)
    logits[0, [4, 9]] = 1.0
    logits[1, [29, 7]] = 2.0
    assert [token for token, _ in sample(logits, [Draw(Sampling(), 0)] * 2)] == [4, 7]


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 3.0, 1.0, 0.5], dtype=np.float32)
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert needs_counts(sampling) and not needs_counts(Sampling())
    counts = TokenCounts(5, prompt=[0, 1], outputs=[2, 2])
    counts.append(3)
    found = adjust(logits, Draw(sampling, 3, counts))
    # prompt tokens only by repetition; outputs also by presence and per count
    assert found.tolist() == [1.0, -4.0, 1.5 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 0.5]
    assert logits.tolist() == [2.0, -2.0, 3.0, 1.0, 0.5]  # the model's own logits stay for log-probabilities


def test_bias_min_tokens_and_mask_hold_for_greedy_too() -> None:
    logits = np.array([[1.0, 2.0, 3.0, 4.0]], dtype=np.float32)

    def greedy(sampling: Sampling, index: int = 0, allowed: np.ndarray | None = None) -> int:
        return sample(logits, [Draw(sampling, index, None, allowed)])[0][0]

    assert greedy(Sampling()) == 3
    assert greedy(Sampling(logit_bias=((0, 5.0), (3, -100.0)))) == 0
    ends = Sampling(min_tokens=2, end_token_ids=(3, 2))
    assert [greedy(ends, index) for index in (0, 1, 2)] == [1, 1, 3]
    assert greedy(Sampling(), allowed=np.array([True, True, False, False])) == 1


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 2.0, -np.inf]], dtype=np.float32)
    sampling = Sampling(temperature=1.0, top_k=1, logit_bias=((0, 50.0),), logprobs=3)
    token, found = sample(logits, [Draw(sampling, 0)])[0]
    assert token == 0 and found is not None
    normalizer = math.log(1 + math.e + 2 * math.e**2)
    assert found.logprob == pytest.approx(-normalizer, abs=1e-12)
    assert [i for i, _ in found.top] == [2, 3, 1]  # equals by id
    assert found.top[0][1] == pytest.approx(2 - normalizer, abs=1e-12)


def test_minus_infinity_leaves_as_a_floor_and_never_as_nan() -> None:
    row = np.full(6, -np.inf, dtype=np.float32)
    row[2] = 1.0
    found = logprobs(row, 0, 6)
    assert found.logprob == -9999.0
    assert [value for _, value in found.top] == [0.0, *[-9999.0] * 5]
    assert sample(row[None], [Draw(Sampling(temperature=1.0, top_p=0.5, seed=3), 0)])[0][0] == 2
    for broken in (np.full(6, np.nan, dtype=np.float32), np.full(6, -np.inf, dtype=np.float32)):
        token, found_or_none = sample(broken[None], [Draw(Sampling(temperature=1.0, logprobs=2), 0)])[0]
        assert 0 <= token < 6 and found_or_none is not None and not math.isnan(found_or_none.logprob)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((17, 49_153)) * 4).astype(
        np.float32
    )  # an odd width moves every row's alignment
    settings = [
        Sampling(temperature=row % 3 / 2, top_p=1 - row % 2 / 5, seed=row, logprobs=2) for row in range(17)
    ]
    draws = [Draw(s, 3) for s in settings]
    together = sample(logits, draws)
    for row in range(17):
        assert sample(logits[row : row + 1].copy(), draws[row : row + 1]) == together[row : row + 1]
