"""The product's first promise: a token's bits do not depend on who shares the batch or how a prompt is cut."""

from pathlib import Path

import pytest

from bench.gpu_check.driving import Sampling
from kernels.runner import ModelRunner, load_runner
from tests.kernels.driving import generate, random_prompts
from tests.kernels.tiny_models import save_model

DTYPES = ("bfloat16", "float16", "float32")


def _check(runner: ModelRunner, lengths: list[int], wanted: int, chunks: tuple[int, ...]) -> None:
    """Every sequence alone, in whole-prompt chunks, is the oracle for every other way to run it."""
    prompts = random_prompts(lengths, runner.vocab_size)
    settings = [
        Sampling(logprobs=3) if i % 2 else Sampling(temperature=1.0, seed=i, logprobs=3)
        for i in range(len(prompts))
    ]
    alone = [
        generate(runner, [prompt], wanted, sampling=sampling)[0]
        for prompt, sampling in zip(prompts, settings, strict=True)
    ]
    for chunk in chunks:
        together = generate(runner, prompts, wanted, chunk=chunk, sampling=settings, stagger=1)
        for length, one, other in zip(lengths, alone, together, strict=True):
            assert one == other, f"prompt of {length} tokens, chunk {chunk}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-gqa3-tied", "llama-biases-head-dim", "qwen3-qk-norm"])
def test_tiny_models(name: str, dtype: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    runner = load_runner(str(tmp_path), dtype=dtype, device="cpu", num_blocks=400, threads=1)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129]
    _check(runner, lengths, 6, chunks=(32, 128, 1))


def test_smollm2(smollm2_dir: Path) -> None:
    """In its own dtype; in float32: `tests/exactness/test_paths.py`."""
    runner = load_runner(str(smollm2_dir), device="cpu", num_blocks=60, threads=1)
    _check(runner, [1, 15, 16, 17, 33, 127, 129, 200], 4, chunks=(32, 128))


def test_thread_counts_agree(smollm2_dir: Path) -> None:
    prompts = random_prompts([40, 150], 49152)
    one, two = (
        generate(
            load_runner(str(smollm2_dir), device="cpu", num_blocks=40, threads=threads), prompts, 4, chunk=128
        )
        for threads in (1, 2)
    )
    assert one == two
