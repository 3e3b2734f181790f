"""The forward pass against transformers, one small random model per architecture and rope variant."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_check.driving import Sampling
from kernels.runner import ModelRunner, load_runner
from tests.kernels.driving import full_logits, generate, random_prompts
from tests.kernels.tiny_models import ARCHITECTURES, save_model


def _runner(folder: Path, dtype: str = "float32", block_size: int = 16) -> ModelRunner:
    return load_runner(
        str(folder), dtype=dtype, device="cpu", num_blocks=200, block_size=block_size, threads=2
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    reference: Any = save_model(name, tmp_path)
    runner = _runner(tmp_path)
    [prompt] = random_prompts([150], 211)
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0]
    found = full_logits(runner, prompt, chunk=64)
    assert wanted.std() > 0.3  # a model whose logits are all alike would prove nothing
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)

    tokens = reference.generate(
        torch.tensor([prompt[:40]]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
    )[0, 40:]
    ends = Sampling(min_tokens=24, end_token_ids=(2,))  # generate's min_new_tokens bans the end token
    [outputs] = generate(runner, [prompt[:40]], 24, sampling=ends)
    assert [token for token, _ in outputs] == tokens.tolist()


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path / "whole")
    save_model("llama-gqa3-tied", tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    [prompt] = random_prompts([30], 211)
    whole = full_logits(_runner(tmp_path / "whole"), prompt, 30)
    assert torch.equal(whole, full_logits(_runner(tmp_path / "shards"), prompt, 30))


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_size_changes_nothing_but_rounding(block_size: int, tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    [prompt] = random_prompts([70], 211)
    logits = full_logits(_runner(tmp_path, block_size=block_size), prompt, 70)
    torch.testing.assert_close(logits, full_logits(_runner(tmp_path), prompt, 70), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, tmp_path: Path) -> None:
    save_model("qwen3-qk-norm", tmp_path)
    [prompt] = random_prompts([60], 211)
    exact, rounded = (full_logits(_runner(tmp_path, kind), prompt, 60) for kind in ("float32", dtype))
    error = (exact - rounded).abs().max() / exact.std()
    assert 0 < error < (0.3 if dtype == "bfloat16" else 0.04)
