"""Every sampler against a plain reference written from the rules, one row at a time, without any of their shortcuts;
and the native one, in each of its variants, against numpy, bit for bit."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from bench.gpu_check.driving import Sampling
from kernels.model_config import MAX_VOCAB
from kernels.native_backend import load_native
from kernels.native_sampling import NativeSampler
from kernels.philox import uniforms
from kernels.sampler import Sampler, choose_sampler
from kernels.sampling import Draw, NumpySampler, Sampled, TokenCounts, adjust, needs_counts, pick
from kernels.step import TokenLogprob
from tests.kernels.random_logits import any_logits


def _samplers() -> list[Sampler]:
    native = load_native()
    if native is None:
        return [NumpySampler()]
    variants = [name for name in ("avx512", "avx2", "plain") if native.has_sampling_variant(name)]
    return [NumpySampler(), *(NativeSampler(native, name) for name in variants)]


SAMPLERS = _samplers()
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
each_native = pytest.mark.parametrize("sampler", SAMPLERS[1:], ids=lambda sampler: sampler.name)


def _sample(sampler: Sampler, logits: np.ndarray, draws: list[Draw]) -> list[Sampled]:
    """All rows have finite logits."""
    found = [sampled for sampled in sampler.sample(logits, draws) if sampled is not None]
    assert len(found) == len(draws)
    return found


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
@pytest.mark.parametrize("vocab", [50, 1500])
def test_draws_equal_the_plain_reference(vocab: int, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((60, vocab)) * 3).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # many ties
    draws = [
        Draw(Sampling(**{"temperature": 1.0, "seed": row, **settings}), output_index=row) for row in range(60)
    ]
    numbers = uniforms([d.sampling.seed for d in draws], list(range(60)), [0] * 60)
    wanted = [_reference_pick(logits[row], draws[row].sampling, numbers[row]) for row in range(60)]  # type: ignore[arg-type]
    for sampler in SAMPLERS:
        assert [token for token, _ in _sample(sampler, logits, draws)] == wanted


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
    together = np.broadcast_to(logits, (20_000, 40))
    sampled = _sample(choose_sampler(), together, draws)
    tokens = [token for token, _ in sampled]
    for sampler in SAMPLERS:  # numpy takes 0.1 ms for each
        assert sampler.sample(together[:1000], draws[:1000]) == sampled[:1000]
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


@each_sampler
def test_greedy_takes_the_lowest_of_equals(sampler: Sampler) -> None:
    logits = np.full((4, 3000), -1.0, dtype=np.float32)
    logits[0, [4, 9]] = 1.0
    logits[1, [2999, 2007]] = 2.0
    logits[2, [700, 1500]] = -0.0, 0.0  # equals, whatever their sign
    logits[3] = -np.inf
    logits[3, [1024, 2048]] = -3e38
    assert [token for token, _ in _sample(sampler, logits, [Draw(Sampling(), 0)] * 4)] == [4, 2007, 700, 1024]


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


@each_sampler
def test_bias_min_tokens_and_mask_hold_for_greedy_too(sampler: Sampler) -> None:
    logits = np.array([[1.0, 2.0, 3.0, 4.0]], dtype=np.float32)

    def greedy(sampling: Sampling, index: int = 0, allowed: np.ndarray | None = None) -> int:
        return _sample(sampler, logits, [Draw(sampling, index, None, allowed)])[0][0]

    assert greedy(Sampling()) == 3
    assert greedy(Sampling(logit_bias=((0, 5.0), (3, -100.0)))) == 0
    ends = Sampling(min_tokens=2, end_token_ids=(3, 2))
    assert [greedy(ends, index) for index in (0, 1, 2)] == [1, 1, 3]
    assert greedy(Sampling(), allowed=np.array([True, True, False, False])) == 1


@each_sampler
def test_logprobs_are_of_the_models_own_distribution(sampler: Sampler) -> None:
    logits = np.array([[0.0, 1.0, 2.0, 2.0, -np.inf]], dtype=np.float32)
    sampling = Sampling(temperature=1.0, top_k=1, logit_bias=((0, 50.0),), logprobs=3)
    token, found = _sample(sampler, logits, [Draw(sampling, 0)])[0]
    assert token == 0 and found is not None
    normalizer = math.log(1 + math.e + 2 * math.e**2)
    assert found.logprob == pytest.approx(-normalizer, abs=1e-12)
    assert [i for i, _ in found.top] == [2, 3, 1]  # equals by id
    assert found.top[0][1] == pytest.approx(2 - normalizer, abs=1e-12)


@each_sampler
def test_minus_infinity_leaves_as_a_floor_and_never_as_nan(sampler: Sampler) -> None:
    row = np.full((1, 6), -np.inf, dtype=np.float32)
    row[0, 2] = 1.0
    [found] = sampler.score(row, [0], [6])
    assert found is not None and found.logprob == -9999.0
    assert [value for _, value in found.top] == [0.0, *[-9999.0] * 5]
    assert [index for index, _ in found.top] == [2, 0, 1, 3, 4, 5]
    drawn = _sample(sampler, row, [Draw(Sampling(temperature=1.0, top_p=0.5, seed=3), 0)])
    assert drawn == [(2, None)]


@each_sampler
def test_what_is_not_finite_becomes_no_token(sampler: Sampler) -> None:
    vocab = 2051
    logits = np.random.default_rng(5).standard_normal((7, vocab)).astype(np.float32)
    logits[0, 2050] = np.nan
    logits[1, 0] = -np.nan  # the sign of a NaN is a bit like any other
    logits[2, 1500] = np.inf
    logits[3] = -np.inf
    logits[4] = np.nan
    logits[5, :2050] = -np.inf  # one is left
    for temperature in (0.0, 1.0):
        draws = [Draw(Sampling(temperature=temperature, logprobs=1), 0) for _ in logits]
        assert [row is None for row in sampler.sample(logits, draws)] == [True] * 5 + [False] * 2
    assert [row is None for row in sampler.score(logits, [0] * 7, [2] * 7)] == [True] * 5 + [False] * 2


@each_sampler
def test_a_temperature_that_overflows_takes_the_best(sampler: Sampler) -> None:
    logits = np.array([[1.0, 3e38, 3.1e38, 3.1e38]], dtype=np.float32)
    assert _sample(sampler, logits, [Draw(Sampling(temperature=0.01), 0)]) == [(2, None)]


def _any_draw(rng: np.random.Generator, vocab: int) -> Draw:
    def ids(most: int) -> list[int]:
        return [int(index) for index in rng.integers(0, vocab, int(rng.integers(0, most)))]

    sampling = Sampling(
        temperature=float(rng.choice([0.0, 1e-4, 0.3, 0.7, 1.0, 1.0, 2.5, 1e3])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5, 1e-9, 1 - 1e-12])),
        top_k=int(rng.choice([0, 0, 1, 7, 50, vocab - 1, vocab, 10 * vocab])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 1e-15, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.4, -2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.1, -0.7])),
        logit_bias=tuple((index, float(rng.normal(0, 5))) for index in ids(6)) if rng.random() < 0.3 else (),
        seed=int(rng.integers(-(2**63), 2**63)),
        child=int(rng.integers(0, 5)),
        min_tokens=int(rng.choice([0, 0, 10])),
        end_token_ids=tuple(ids(3)),
        logprobs=[None, None, None, 0, 3, 20][rng.integers(0, 6)],
    )
    counts = TokenCounts(vocab, ids(40), ids(40)) if needs_counts(sampling) else None
    allowed = None
    if rng.random() < 0.2:
        allowed = rng.random(vocab) < 0.1
        allowed[rng.integers(0, vocab)] = True
    return Draw(sampling, int(rng.integers(0, 2000)), counts, allowed)


@each_native
@pytest.mark.parametrize(("vocab", "rows"), [(1, 20), (63, 300), (64, 200), (1500, 200), (49_152, 20)])
def test_native_gives_the_bits_of_numpy(sampler: Sampler, vocab: int, rows: int) -> None:
    """Fresh logits in each run, and every setting with every other."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    logits, draws = any_logits(rng, rows, vocab), [_any_draw(rng, vocab) for _ in range(rows)]
    kept = logits.copy()
    assert sampler.sample(logits, draws) == NumpySampler().sample(logits, draws)
    token_ids, tops = rng.integers(0, vocab, rows).tolist(), rng.integers(0, 22, rows).tolist()
    assert sampler.score(logits, token_ids, tops) == NumpySampler().score(logits, token_ids, tops)
    assert np.array_equal(logits.view(np.int32), kept.view(np.int32)), "logits are read only"


@each_sampler
def test_no_rows(sampler: Sampler) -> None:
    nothing = np.empty((0, 50), dtype=np.float32)
    assert sampler.sample(nothing, []) == [] and sampler.score(nothing, [], []) == []


@each_native
def test_native_numbers_are_those_of_philox(sampler: Sampler) -> None:
    """Of many equal tokens the one that is taken shows the leading bits of the number."""
    vocab = 1 << 12
    draws = [Draw(Sampling(temperature=1.0, seed=2**40 * i - i, child=i), i * 7) for i in range(200)]
    numbers = uniforms([d.sampling.seed for d in draws], [i * 7 for i in range(200)], list(range(200)))
    sampled = _sample(sampler, np.zeros((200, vocab), dtype=np.float32), draws)
    assert [token for token, _ in sampled] == (numbers * vocab).astype(int).tolist()


def test_the_widest_vocabulary_is_summed_exactly() -> None:
    """All equal: every weight is the largest there is. One id more would be refused."""
    vocab = MAX_VOCAB
    logits = np.zeros((2, vocab), dtype=np.float32)
    draws = [Draw(Sampling(temperature=1.0, seed=seed, logprobs=0, top_p=0.75), 0) for seed in (1, 2)]
    found = [sampler.sample(logits, draws) for sampler in SAMPLERS]
    assert all(each == found[0] for each in found)
    assert found[0][0] is not None and found[0][0][0] < 0.75 * vocab
    assert found[0][0][1] == TokenLogprob(found[0][0][0], -math.log(vocab), ())
    for sampler in SAMPLERS:
        with pytest.raises(AssertionError):
            sampler.sample(np.zeros((1, vocab + 1), dtype=np.float32), draws[:1])


@pytest.mark.parametrize("wrong", [-1, 300, 2**31 - 1, 2**40])
def test_counts_take_ids_of_the_vocabulary_only(wrong: int) -> None:
    """They come from the wire, and a decode worker never computes with a prompt that it took over."""
    for prompt, outputs in (([5, wrong], [7]), ([5], [7, wrong])):
        with pytest.raises(IndexError, match="300"):
            TokenCounts(300, prompt, outputs)
    counts = TokenCounts(300, [5], [7])
    with pytest.raises(IndexError, match="300"):
        counts.append(wrong)
    assert len(counts) == 2


@each_native
@pytest.mark.parametrize("wrong", [-1, 300, 2**31 - 1])
def test_what_c_indexes_with_is_in_the_vocabulary(sampler: Sampler, wrong: int) -> None:
    logits = np.zeros((1, 300), dtype=np.float32)
    for draw in (
        Draw(Sampling(logit_bias=((3, 1.0), (wrong, 1.0))), 0),
        Draw(Sampling(min_tokens=1, end_token_ids=(3, wrong)), 0),
        Draw(Sampling(repetition_penalty=1.3), 0, TokenCounts(301, [3], [])),
        Draw(Sampling(), 0, None, np.ones(301, dtype=np.bool_)),
        Draw(Sampling(), 0, None, np.ones(299, dtype=np.bool_)),
        Draw(Sampling(), 0, None, np.ones(600, dtype=np.bool_)[::2]),
    ):
        with pytest.raises(IndexError, match="300"):
            sampler.sample(logits, [draw])
    with pytest.raises(IndexError, match="300"):
        sampler.score(logits, [wrong], [1])


def test_counts_grow_with_what_is_put_out() -> None:
    """Token by token, or all at once: the same penalties."""
    rng = np.random.default_rng(3)
    outputs = rng.integers(0, 300, 400).tolist()
    grown, whole = TokenCounts(300, [5, 5, 7], []), TokenCounts(300, [5, 5, 7], outputs)
    for token_id in outputs:
        grown.append(token_id)
    sampling = Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1)
    logits = rng.standard_normal(300).astype(np.float32)
    assert np.array_equal(adjust(logits, Draw(sampling, 0, grown)), adjust(logits, Draw(sampling, 0, whole)))
    assert len(grown) == len({5, 7, *outputs})


@each_sampler
def test_a_row_does_not_depend_on_its_neighbours(sampler: Sampler) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((17, 49_153)) * 4).astype(
        np.float32
    )  # an odd width moves every row's alignment
    settings = [
        Sampling(temperature=row % 3 / 2, top_p=1 - row % 2 / 5, seed=row, logprobs=2) for row in range(17)
    ]
    draws = [Draw(s, 3) for s in settings]
    together = sampler.sample(logits, draws)
    for row in range(17):
        assert sampler.sample(logits[row : row + 1].copy(), draws[row : row + 1]) == together[row : row + 1]
