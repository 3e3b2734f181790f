"""How a GPU's memory becomes a pool: the arithmetic with figures put in, the profile's steps on a real tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cache import AskedTooMuch, CacheLayout
from kernels.gpu.memory import (
    SPARE_BYTES,
    UNCOUNTED_BYTES,
    Profile,
    largest_counts,
    measure,
    pool_blocks,
)
from kernels.runner import load_runner
from tests.kernels.tiny_models import save_model

GIB = 1 << 30
LAYOUT = CacheLayout(32, 8, 128, 16, torch.bfloat16)  # 2 MiB a block


def profile(**changes: int) -> Profile:
    """An 8B model on an H200: 15 GiB of weights, 3 GiB of a step."""
    return Profile(**{"total": 140 * GIB, "free": 124 * GIB, "peak": 18 * GIB, "held": 15 * GIB, **changes})


def test_the_pool_is_what_weights_and_step_leave_of_the_share() -> None:
    blocks = pool_blocks(profile(), 0.9, LAYOUT)
    taken = blocks * LAYOUT.block_bytes + 18 * GIB + UNCOUNTED_BYTES
    assert 0 <= int(0.9 * 140 * GIB) - taken < LAYOUT.block_bytes, "not a block more, not a block less"
    assert pool_blocks(profile(graphs=GIB), 0.9, LAYOUT) == blocks - GIB // LAYOUT.block_bytes


def test_two_workers_with_half_each_fit_whoever_comes_first() -> None:
    first = pool_blocks(profile(), 0.45, LAYOUT)
    held = first * LAYOUT.block_bytes + 18 * GIB + UNCOUNTED_BYTES
    beside = profile(free=140 * GIB - held - 15 * GIB - UNCOUNTED_BYTES)
    assert pool_blocks(beside, 0.45, LAYOUT) == first


def test_what_others_hold_is_not_given_away() -> None:
    crowded = profile(free=20 * GIB)
    blocks = pool_blocks(crowded, 0.9, LAYOUT)
    left = 20 * GIB - blocks * LAYOUT.block_bytes
    assert left >= 3 * GIB + SPARE_BYTES, "the largest step still runs"
    assert left < 3 * GIB + SPARE_BYTES + LAYOUT.block_bytes
    with pytest.raises(
        AskedTooMuch, match=r"0\.9: 126\.0 GiB of the GPU's 140\.0 GiB, of which others.*2\.0 GiB free"
    ):
        pool_blocks(profile(free=2 * GIB), 0.9, LAYOUT)


def test_a_share_without_room_names_flag_and_numbers() -> None:
    with pytest.raises(AskedTooMuch) as refused:
        pool_blocks(profile(), 0.1, LAYOUT)
    assert str(refused.value) == (
        "--gpu-memory-utilization 0.1: 14.0 GiB of the GPU's 140.0 GiB. One KV block takes 2.0 MiB; weights and the "
        "largest step 18.6 GiB: raise it, or lower --max-num-batched-tokens or --max-num-seqs"
    )


@pytest.mark.parametrize(
    ("step_tokens", "rows", "longest"), [(2048, 64, 8192), (2048, 4, 100), (16, 64, 50), (7, 1, 9), (5, 5, 5)]
)
def test_the_largest_step_is_as_large_as_steps_can_get(step_tokens: int, rows: int, longest: int) -> None:
    counts = largest_counts(step_tokens, rows, longest)
    assert len(counts) == rows and counts.min() >= 1 and counts.max() <= longest
    assert counts.sum() == max(rows, min(step_tokens, rows * longest))


class Noted:
    """A device's answers from a list; what was asked in between is run for real."""

    def __init__(self, peaks: list[int]) -> None:
        self._peaks = peaks

    def start(self) -> None: ...

    def peak(self) -> int:
        return self._peaks.pop(0)

    def held(self) -> int:
        return 100

    def free_and_total(self) -> tuple[int, int]:
        return 400, 1000


@pytest.mark.parametrize(("graphs", "of_graphs"), [(True, 20), (False, 0)])
def test_a_profile_runs_the_largest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool, of_graphs: int
) -> None:
    save_model("qwen3-qk-norm", tmp_path)
    runner = load_runner(str(tmp_path), device="cpu", num_blocks=4, max_num_seqs=5)
    ran: list[tuple[int, int, int]] = []
    forward, logits = runner.model.forward, runner.model.logits

    def watched(ids: torch.Tensor, step: object, cache: object) -> torch.Tensor:
        hidden = forward(ids, step, cache)  # type: ignore[arg-type]
        ends = np.asarray(step.starts) + step.counts  # type: ignore[attr-defined]
        ran.append((len(ids), len(ends), int(ends.max())))
        return hidden

    def head(hidden: torch.Tensor) -> torch.Tensor:
        heads.append(len(hidden))
        return logits(hidden)

    heads: list[int] = []
    monkeypatch.setattr(runner.model, "forward", watched)
    monkeypatch.setattr(runner.model, "logits", head)
    found = measure(
        runner.model,
        runner.layout,
        Noted([120, 170]),
        step_tokens=96,
        max_num_seqs=5,
        max_model_len=300,
        graphs=graphs,
    )
    assert ran == [(5, 5, 300), (96, 5, 300)] and heads == [5, 64]
    assert found == Profile(total=1000, free=400, peak=170, held=100, graphs=of_graphs)
