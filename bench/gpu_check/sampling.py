"""Sampling on the device: the ids of the rule in numpy, bit for bit, alone and together, and its speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bench.gpu_check.driving import Sampling
from bench.gpu_check.findings import Check, Speed
from bench.gpu_check.places import Place
from bench.gpu_check.roofs import Roofs
from kernels.gpu.sampling import sample_on_device
from kernels.gpu.sampling_table import SamplingTable
from kernels.sampling import Draw, NumpySampler, TokenCounts

PART = "sampling"
POISON = -77
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8)


def settings(vocab: int) -> list[Sampling]:
    """Of each kind of row one."""
    return [
        GREEDY,
        DRAWN,
        replace(DRAWN, top_p=0.9),
        replace(DRAWN, top_k=50),
        replace(DRAWN, min_p=0.05, temperature=1.5),
        replace(DRAWN, top_k=vocab // 2, top_p=0.5, min_p=1e-4),
        replace(DRAWN, logit_bias=((3, 4.5), (vocab - 1, -3.0), (3, 0.7)), min_tokens=9, end_token_ids=(2,)),
        replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    ]


def checks(place: Place) -> Iterator[Check]:
    vocab = place.shape.vocab_size
    rng = np.random.default_rng(0)
    kinds = settings(vocab)
    rows = 3 * len(kinds)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[len(kinds)] = np.round(logits[len(kinds)])  # many equals: the lowest id counts
    logits[-1, 5] = np.nan
    draws = []
    for row in range(rows):
        asked = replace(kinds[row % len(kinds)], seed=row)
        seen = rng.integers(0, vocab, (2, 40)).tolist()
        counts = TokenCounts(vocab, *seen) if asked.repetition_penalty != 1.0 else None
        allowed = rng.random(vocab) < 0.3 if row % 5 == 4 else None
        draws.append(Draw(asked, row, counts, allowed))
    told = NumpySampler().sample(logits, draws)
    wanted = [-1 if one is None else one[0] for one in told]
    there = torch.from_numpy(logits).to(place.device)
    with _quiet():
        out = torch.full((rows + 8,), POISON, dtype=torch.int32, device=place.device)
        table = SamplingTable.from_draws(draws, vocab, place.device)
        found = sample_on_device(there, table, out=out[4:-4]).tolist()  # 16 bytes: no other variant
        alone = []
        for row in range(0, rows, 5):
            one = SamplingTable.from_draws(draws[row : row + 1], vocab, place.device)
            alone += sample_on_device(there[row : row + 1], one).tolist()
    wrong = sum(ours != right for ours, right in zip(found, wanted, strict=True))
    yield Check(PART, f"{rows} rows of {vocab}: ids that are not numpy's", wrong, 0)
    others = sum(ours != right for ours, right in zip(alone, found[::5], strict=True))
    yield Check(PART, f"{vocab} ids: rows that have another id alone", others, 0)
    beside = int((out[:4] != POISON).sum() + (out[-4:] != POISON).sum())
    yield Check(PART, f"{vocab} ids: written beside the rows", beside, 0)


def _quiet() -> contextlib.AbstractContextManager[object]:
    """The interpreter is numpy, which warns where a GPU has infinity and goes on."""
    return np.errstate(over="ignore", invalid="ignore")


def speeds(place: Place, roofs: Roofs) -> Iterator[Speed]:
    """The logits read once are the roof: what draws goes over them several times, mostly in the L2."""
    vocab, rows = place.shape.vocab_size, place.sampled_rows
    logits = 3 * place.random(rows, vocab, dtype=torch.float32)
    ways = {
        "greedy": GREEDY,
        "temperature": DRAWN,
        "top-p 0.9": replace(DRAWN, top_p=0.9),
        "top-k 50, min-p 0.05": replace(DRAWN, top_k=50, min_p=0.05),
    }
    for name, asked in ways.items():
        table = SamplingTable.from_draws([Draw(asked, row) for row in range(rows)], vocab, place.device)
        with _quiet():
            seconds = place.clock.device_s(lambda t=table: sample_on_device(logits, t))  # type: ignore[misc]
        yield roofs.speed(PART, f"{name}, {rows} rows of {vocab}", seconds, moved_bytes=4 * rows * vocab)
