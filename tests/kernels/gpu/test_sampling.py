"""Sampling in Triton against numpy, id by id: every setting with every other, on fresh logits in each run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu_check.driving import Sampling
from kernels.gpu import sampling
from kernels.gpu.sampler import GpuSampler
from kernels.gpu.sampling import sample_on_device
from kernels.gpu.sampling_table import SamplingTable
from kernels.runner import load_runner
from kernels.sampler import choose_sampler, draw
from kernels.sampling import Draw, NumpySampler, TokenCounts, adjust, keep, weigh
from kernels.step import SamplingLike
from tests.kernels.driving import generate, random_prompts
from tests.kernels.gpu.grid import WHOLE
from tests.kernels.gpu.sampling_probes import adjusted_row, falls_on, weights_of
from tests.kernels.random_logits import any_logits
from tests.kernels.tiny_models import save_model

POISON = 123_456_789


def on_device(logits: np.ndarray, draws: list[Draw], tile: int = 64, room: int = 16) -> list[int]:
    there = torch.from_numpy(logits.copy())
    out = torch.full((len(logits) + 2,), POISON, dtype=torch.int32)
    table = SamplingTable.from_draws(draws, logits.shape[1])
    with np.errstate(over="ignore"):  # the interpreter is numpy
        found = sample_on_device(there, table, out=out[1:-1], tile=tile, room=room)
    assert out[0] == out[-1] == POISON, "written beside its rows"
    assert np.array_equal(there.numpy().view(np.int32), logits.view(np.int32)), "logits are read only"
    return list(found.tolist())


def by_rule(logits: np.ndarray, draws: list[Draw]) -> list[int]:
    return [-1 if sampled is None else sampled[0] for sampled in NumpySampler().sample(logits, draws)]


def fresh() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def any_draw(rng: np.random.Generator, vocab: int) -> Draw:
    def ids(most: int) -> list[int]:
        return [int(index) for index in rng.integers(0, vocab, int(rng.integers(0, most)))]

    settings = Sampling(
        temperature=float(rng.choice([0.0, 1e-5, 1e-4, 0.3, 0.7, 1.0, 1.0, 2.5, 1e3, 1e30])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.9, 0.5, 1e-9, 0.0, 1 - 1e-12])),
        top_k=int(rng.choice([0, 0, 1, 7, 50, vocab - 1, vocab, 10 * vocab])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.999999, 1e-15, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.4, -2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.1, -0.7])),
        # Ids that are biased more than once too: the order of fp32 sums is part of the rule.
        logit_bias=tuple((index, float(rng.normal(0, 5))) for index in ids(90)) if rng.random() < 0.4 else (),
        seed=int(rng.integers(-(2**63), 2**63)),
        child=int(rng.integers(0, 5)),
        min_tokens=int(rng.choice([0, 0, 10])),
        end_token_ids=tuple(ids(3)),
    )
    penalized = settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty
    counts = None if penalized == (1.0, 0.0, 0.0) else TokenCounts(vocab, ids(150), ids(150))
    allowed = None
    if rng.random() < 0.25:
        allowed = rng.random(vocab) < rng.choice([0.1, 0.9])
        if rng.random() < 0.9:  # else it may forbid all
            allowed[rng.integers(0, vocab)] = True
    return Draw(settings, int(rng.choice([0, 3, 12, 2000, 2**31 + 5])), counts, allowed)


CASES = [  # vocabulary, rows, tile, room: one tile and many, all weights gathered at once and after narrowing
    (1, 4, 64, 16),
    (2, 10, 64, 16),
    (63, 10, 64, 64),
    (64, 10, 64, 16),
    (65, 10, 64, 16),
    (300, 6, 128, 16),
    (1000, 5, 256, 64),
    (1000, 16, sampling.TILE, sampling.ROOM),
]


@pytest.mark.parametrize(("vocab", "rows", "tile", "room"), CASES)
def test_ids_are_those_of_the_rule(vocab: int, rows: int, tile: int, room: int) -> None:
    rng = fresh()
    rows *= 10 if WHOLE else 1
    logits, draws = any_logits(rng, rows, vocab), [any_draw(rng, vocab) for _ in range(rows)]
    assert on_device(logits, draws, tile, room) == by_rule(logits, draws)


def test_a_row_has_its_id_in_any_company_tile_and_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sampled alone, together, in another order, and three at a time for want of memory."""
    rng = fresh()
    vocab, rows = 130, 4
    logits, draws = any_logits(rng, rows, vocab), [any_draw(rng, vocab) for _ in range(rows)]
    together = on_device(logits, draws)
    assert [on_device(logits[i : i + 1], draws[i : i + 1])[0] for i in range(rows)] == together
    order = rng.permutation(rows)
    assert on_device(logits[order], [draws[i] for i in order]) == [together[i] for i in order]
    assert on_device(logits, draws, tile=32, room=64) == together
    monkeypatch.setattr(sampling, "WORKSPACE_BYTES", 3 * (12 * vocab + 8 * sampling.ROOM))
    assert sampling.rows_at_once(vocab) == 3
    assert on_device(logits, draws) == together


def test_every_cut_of_equals_and_near_equals() -> None:
    """The cut falls inside a run of ties, and between weights that differ by a unit."""
    flat = np.zeros(200, dtype=np.float32)
    steps = np.float32(1.0) + np.arange(200, dtype=np.float32) * np.float32(2.0**-23)
    stairs = np.repeat(np.arange(20, dtype=np.float32) * np.float32(0.1), 10)
    rng = fresh()
    logits, draws = [], []
    cuts = ((77, 1.0), (0, 0.3), (123, 0.5))
    for row in (flat, rng.permutation(steps), rng.permutation(stairs)):
        for top_k, top_p in cuts:
            logits.append(row)
            settings = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=int(rng.integers(2**62)))
            draws.append(Draw(settings, 1))
    together = np.stack(logits)
    assert on_device(together, draws, tile=128) == by_rule(together, draws)


def test_weights_and_their_sums_have_the_rules_bits() -> None:
    """An id seldom shows the last bits of a weight."""
    rng = fresh()
    edges = np.array([0.0, -0.0, 39.9, 40.0, 40.1, 1e4, 1e38, np.inf], dtype=np.float32)
    logits = np.concatenate([-edges, -rng.uniform(0, 41, 3000), -rng.exponential(1e-4, 90)]).astype(
        np.float32
    )
    for temperature in (1.0, 0.7):
        expected = weigh(logits / np.float32(temperature))
        found, sums = torch.full((len(logits),), -1), torch.zeros(2, dtype=torch.int64)
        there = torch.from_numpy(logits)
        best = torch.tensor([(logits / np.float32(temperature)).max()])
        weights_of[(1,)](found, sums, there, len(logits), temperature, best, TILE=1024)
        assert np.array_equal(found.numpy(), expected)
        assert sums.tolist() == [expected.sum(), np.count_nonzero(expected)]


def test_adjusted_logits_have_the_rules_bits() -> None:
    """Seen ids of the prompt alone, of the outputs, and of both; an id biased twice, where fp32 sums tell the order."""
    rng = fresh()
    vocab = 100
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    sampling = Sampling(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((7, 1e8), (3, 0.1), (7, -1e8), (7, 0.5)),
        min_tokens=99,
        end_token_ids=(50, 99),
    )
    counts = TokenCounts(vocab, rng.integers(0, 60, 40).tolist(), rng.integers(30, 100, 90).tolist())
    allowed = rng.random(vocab) < 0.7
    allowed[7] = True
    for mask in (None, allowed):
        draw = Draw(sampling, 5, counts, mask)
        found = torch.full((vocab,), float("nan"))
        words = SamplingTable.from_draws([draw], vocab).words
        adjusted_row[(1,)](found, torch.from_numpy(logits), vocab, words, TILE=32)
        expected = adjust(logits, draw)
        assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))


def test_a_number_on_the_edge_falls_on_the_first_id_whose_weights_exceed_it() -> None:
    weights = torch.tensor([0, 5, 0, 3, 3, 9, 0, 3, 1], dtype=torch.int64)

    def id_at(least: int, equals: int, target: int) -> int:
        found = torch.full((1,), POISON, dtype=torch.int32)
        falls_on[(1,)](found, weights, len(weights), torch.tensor([least, equals, target]), TILE=4)
        return int(found)

    assert [id_at(0, 0, target) for target in (0, 4, 5, 7, 8, 10, 11, 19, 20, 22, 23)] == [
        1, 1, 3, 3, 4, 4, 5, 5, 7, 7, 8,
    ]  # fmt: skip
    assert [id_at(3, 2, target) for target in (4, 5, 8, 11, 19)] == [1, 3, 4, 5, 5]  # the third 3 is cut off
    assert [id_at(3, 0, target) for target in (4, 5, 13)] == [1, 5, 5]


def test_rules_that_meet_at_one_weight() -> None:
    """Min-p one unit over the weight at which top-k cut takes that away, and one at it leaves it; top-k one under the
    vocabulary takes the last of equals."""
    row = np.array([0.0, -1.5, -1.5, -1.5, -9.0], dtype=np.float32)
    weight = int(weigh(row)[1])
    for min_weight, last in ((weight, 2), (weight + 1, 0)):
        settings = Sampling(temperature=1.0, top_k=3, min_p=min_weight / 2.0**44)
        assert np.flatnonzero(keep(weigh(row), settings)).tolist() == list(range(last + 1))
        draws = [Draw(settings, index) for index in range(6)]
        rows = np.repeat(row[None], 6, axis=0)
        assert on_device(rows, draws) == by_rule(rows, draws)
    two = np.zeros((6, 2), dtype=np.float32)
    assert on_device(two, [Draw(Sampling(temperature=1.0, top_k=1), index) for index in range(6)]) == [0] * 6


def test_what_is_not_finite_becomes_no_token() -> None:
    vocab = 70
    logits = np.random.default_rng(5).standard_normal((7, vocab)).astype(np.float32)
    logits[0, 69] = np.nan
    logits[1, 0] = -np.nan
    logits[2, 50] = np.inf
    logits[3] = -np.inf
    logits[4] = np.nan
    logits[5, :69] = -np.inf  # one is left
    for temperature in (0.0, 1.0):
        found = on_device(logits, [Draw(Sampling(temperature=temperature), 0)] * 7)
        assert found[:5] == [-1] * 5 and found[5] == 69 and 0 <= found[6] < vocab


def test_greedy_takes_the_lowest_of_equals_and_a_mask_that_forbids_all_the_first() -> None:
    logits = np.full((4, 200), -1.0, dtype=np.float32)
    logits[0, [4, 90]] = 1.0
    logits[1, [199, 130]] = 2.0
    logits[2, [70, 150]] = -0.0, 0.0  # equals, whatever their sign
    logits[3, 77] = 5.0
    nothing = np.zeros(200, dtype=bool)
    draws = [Draw(Sampling(), 0)] * 3 + [Draw(Sampling(), 0, None, nothing)]
    assert on_device(logits, draws) == by_rule(logits, draws) == [4, 130, 70, 0]
    drawn = [Draw(Sampling(temperature=1.0), 0, None, nothing)] * 4
    assert on_device(logits, drawn) == by_rule(logits, drawn) == [0] * 4


def test_a_temperature_that_overflows_takes_the_best() -> None:
    logits = np.array([[1.0, 3e38, 3.1e38, 3.1e38]], dtype=np.float32)
    assert on_device(logits, [Draw(Sampling(temperature=0.01), 0)]) == [2]


def test_rows_beyond_2_31_elements() -> None:
    """Memory that is never touched costs none."""
    rng = fresh()
    vocab, stride = 65, 2**31 + 5
    apart = torch.empty(stride + vocab, dtype=torch.float32).as_strided((2, vocab), (stride, 1))
    logits, draws = any_logits(rng, 2, vocab), [any_draw(rng, vocab) for _ in range(2)]
    apart.copy_(torch.from_numpy(logits))
    found = sample_on_device(apart, SamplingTable.from_draws(draws, vocab), tile=64, room=16)
    assert found.tolist() == by_rule(logits, draws)


def test_the_sampler_gives_what_numpy_gives_log_probabilities_included() -> None:
    rng = fresh()
    vocab, rows = 90, 8
    logits = any_logits(rng, rows, vocab)
    logits[3, 7] = np.nan
    asked: list[int | None] = [None, 0, 3, 3, 200, None, 1, 0]
    draws = [Draw(Sampling(temperature=0.8, seed=row, logprobs=top), row) for row, top in enumerate(asked)]
    sampler = GpuSampler(torch.device("cpu"), NumpySampler())
    expected = NumpySampler().sample(logits, draws)
    assert sampler.sample(logits, draws) == expected and expected[3] is None
    for one in (sampler, NumpySampler()):
        assert draw(one, torch.from_numpy(logits), draws).take() == expected
    ids = draw(sampler, torch.from_numpy(logits), draws).ids
    assert ids is not None and ids.tolist() == [-1 if row is None else row[0] for row in expected]
    assert sampler.sample(logits[:0], []) == []


def test_a_runner_draws_on_the_device_what_it_draws_on_the_host(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    runner = load_runner(str(tmp_path), device="cpu", num_blocks=20, max_num_seqs=3, max_model_len=60)
    prompts = random_prompts([3, 17, 9], runner.vocab_size)
    settings = [
        Sampling(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5),
        Sampling(temperature=1.3, seed=6, top_k=9, logprobs=2),
        Sampling(logit_bias=((4, 2.0),)),
    ]
    host = generate(runner, prompts, 4, sampling=settings)
    runner._sampler = GpuSampler(runner.model.device, choose_sampler())
    assert generate(runner, prompts, 4, sampling=settings) == host


@pytest.mark.parametrize(
    ("sampling", "counts", "allowed"),
    [
        (Sampling(logit_bias=((9, 1.0),)), None, None),
        (Sampling(logit_bias=((-1, 1.0),)), None, None),
        (Sampling(end_token_ids=(9,), min_tokens=5), None, None),
        (Sampling(repetition_penalty=2.0), TokenCounts(10, [9], []), None),
        (Sampling(), None, np.ones(10, dtype=bool)),
        (Sampling(), None, np.ones(9, dtype=np.uint8)),
    ],
)
def test_what_points_outside_the_vocabulary_is_refused_before_anything_runs(
    sampling: SamplingLike, counts: TokenCounts | None, allowed: np.ndarray | None
) -> None:
    with pytest.raises(IndexError):
        SamplingTable.from_draws([Draw(sampling, 0, counts, allowed)], 9)
