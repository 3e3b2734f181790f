"""Steps before serving: they fit whatever the worker is, tell all terms apart, and leave nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.batching import Batch, Joined
from common.request import SamplingParams
from common.step_times import TELLING, StepTimes
from kernels.runner import ModelRunner, load_runner
from tests.kernels.tiny_models import save_model
from transfer.rehearsal import Sizes, rehearse

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("step_tokens", "num_seqs", "blocks"), [(64, 8, 200), (256, 1, 40), (1, 2, 3), (2048, 64, 4)]
)
def test_workers_of_any_size_know_their_step_times_and_compute_as_before(
    tmp_path: Path, step_tokens: int, num_seqs: int, blocks: int
) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    made = [
        load_runner(str(tmp_path), device="cpu", num_blocks=blocks, max_num_seqs=num_seqs, threads=1)
        for _ in range(2)
    ]
    rehearsed, fresh = made
    layout = rehearsed.layout
    measured = rehearse(
        rehearsed,
        Sizes(step_tokens, num_seqs, rehearsed.max_model_len, blocks, layout.block_size),
        limit_s=60,
    )
    assert all(seconds > 0 for _, seconds in measured)
    times = StepTimes()
    times.begin_with(measured)
    assert times.coefficients is not None and times.seconds(measured[0][0]) > 0
    assert first_token(rehearsed) == first_token(fresh)


def first_token(runner: ModelRunner) -> object:
    """With its log-probability, through blocks that the rehearsal wrote."""
    seen = replace(SamplingParams(max_tokens=1, temperature=0.0), logprobs=3)
    joined = Joined(
        slot=0, tokens=PROMPT, prompt_len=len(PROMPT), blocks=[0], sampling=seen, scored=len(PROMPT)
    )
    batch = Batch(
        joined=[joined], slots=[0], starts=[0], counts=[len(PROMPT)], samples=[True], token_ids=PROMPT
    )
    result = runner.run(batch)
    return result.ids[0], result.logprobs[0]


def test_no_step_begins_after_the_limit(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    runner = load_runner(str(tmp_path), device="cpu", num_blocks=40, max_num_seqs=4, threads=1)
    sizes = Sizes(64, 4, runner.max_model_len, 40, runner.layout.block_size)
    assert rehearse(runner, sizes, longest_s=-1) == []
    times = StepTimes()
    times.begin_with(rehearse(runner, sizes, limit_s=-1))
    assert times.observed == TELLING and times.coefficients is not None, "the least that says something"
