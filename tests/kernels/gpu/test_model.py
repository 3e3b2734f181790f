"""Whole models on the Triton path, in the interpreter: the CPU path's tokens, and the same bits however computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_check.driving import Sampling
from kernels.device import OnGpu
from kernels.gpu import backend as triton_backend
from kernels.gpu.attention import paged_attention
from kernels.runner import ModelRunner, load_runner
from tests.kernels.driving import fill_with_nan, generate, random_prompts
from tests.kernels.tiny_models import save_model

BLOCK = 16


def runner(folder: Path, backend: str, dtype: str = "float32", *, fast_chunks: bool = False) -> ModelRunner:
    made = load_runner(
        str(folder), dtype=dtype, device="cpu", block_size=BLOCK, num_blocks=24, max_num_seqs=4,
        max_model_len=160, backend=backend, gpu=OnGpu(fast_chunks=fast_chunks),  # type: ignore[arg-type]
    )  # fmt: skip
    fill_with_nan(made)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3, the one family that norms queries and keys too."""
    target: Path = tmp_path_factory.mktemp("model")
    save_model("qwen3-qk-norm", target)
    return target


def test_tokens_are_those_of_the_cpu_path(folder: Path) -> None:
    prompts = random_prompts([1, 18], 211)
    triton = generate(runner(folder, "triton"), prompts, 3)
    for backend in ("native", "torch"):
        told = generate(runner(folder, backend), prompts, 3)
        assert [[token for token, _ in row] for row in triton] == [
            [token for token, _ in row] for row in told
        ]
    assert runner(folder, "triton").attention_backend.startswith("triton:")


def test_bits_are_the_same_in_chunks_alone_in_a_batch_and_recomputed(folder: Path) -> None:
    """Log-probabilities tell bits. Recomputed: prompt and output of one that was put out, as one prompt."""
    prompts = random_prompts([2, 18], 211)
    sampling = [Sampling(logprobs=2)] * 2
    together = generate(runner(folder, "triton"), prompts, 3, sampling=sampling)
    chunked = generate(runner(folder, "triton"), prompts, 3, sampling=sampling, chunk=7)
    assert chunked == together
    for prompt, outputs in zip(prompts, together, strict=True):
        assert generate(runner(folder, "triton"), [prompt], 3, sampling=sampling[:1]) == [outputs]
    first, *rest = together[1]
    (again,) = generate(runner(folder, "triton"), [[*prompts[1], first[0]]], 2, sampling=sampling[:1])
    assert again == rest


def test_chunks_in_large_tiles_are_in_the_fingerprint_and_reach_the_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of which one is fast do not exchange blocks."""
    forms: list[bool] = []
    real = paged_attention

    def watched(*given: Any, fast: bool) -> torch.Tensor:
        forms.append(fast)
        return real(*given, fast=fast)

    monkeypatch.setattr(triton_backend, "paged_attention", watched)
    fast = runner(folder, "triton", fast_chunks=True)
    assert fast.attention_backend == f"{runner(folder, 'triton').attention_backend}:fast"
    prompts = random_prompts([18], 211)
    said = generate(fast, prompts, 1)
    assert set(forms) == {True}
    assert [token for token, _ in said[0]] == [
        token for token, _ in generate(runner(folder, "triton"), prompts, 1)[0]
    ]
    assert set(forms) == {True, False}


def test_the_layout_of_a_device_is_in_the_fingerprint(folder: Path) -> None:
    triton, native = runner(folder, "triton").describe(), runner(folder, "native").describe()
    assert triton["kv_layout"] == "block(layer,kv,head,(k:token,dim|v:token,dim))"
    assert triton["kv_layout"] != native["kv_layout"]
    assert triton["attention_backend"] != native["attention_backend"]
    assert torch.isfinite(torch.tensor(float(triton["block_bytes"])))
