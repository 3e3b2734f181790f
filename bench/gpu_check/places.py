"""Where a run takes place and at which sizes: a GPU and an 8B model's shapes, or the interpreter and tiny ones."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.clock import Clock
from kernels.device import memory_bytes
from kernels.gpu.tuning import Launch, attention_launch
from kernels.model_config import ModelConfig

BLOCK_SIZE = 16
MAX_LEN = 8192
Rows = Sequence[tuple[int, int]]
"""Tokens before, and query tokens, of each row."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
}
SMALL: dict[str, Any] = {  # norms queries and keys too, and three query heads share a KV head
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    **SMALL,
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "dtype": "float32",  # the interpreter's bf16 is wrong
}
MODELS = {"8B": LLAMA_8B, "small": SMALL, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention is checked at."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Place:
    """`dtype`: of activations and cache. `checked`: rows of attention that meet edges of blocks, tiles and splits."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    shape: ModelConfig
    """Of the kernels that are timed."""
    attention: Sequence[Heads]
    checked: Rows
    decode: Sequence[Rows]
    chunks: Sequence[Rows]
    tokens: Sequence[int]
    """Of the small kernels' timed calls."""
    moved_blocks: int
    sampled_rows: int
    models: Sequence[str]
    """Of `MODELS`: tokens are compared over all paths; the steps of the last one are timed."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def eps(self) -> float:
        """The step from 1 to the next number: a rounding is off by half of it."""
        return torch.finfo(self.dtype).eps

    @property
    def free_bytes(self) -> int:
        """Of the device."""
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else memory_bytes(self.device)

    def tidy(self) -> None:
        """Gives back what nothing refers to any more: to other processes too. Runners are cycles."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def launch(self, dim: int) -> Launch:
        if self.on_gpu:
            return attention_launch(dim, self.dtype, MAX_LEN, self.device)
        return Launch(rows=16, keys=16, split=32, warps=4, stages=1)  # edges come early

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        """From a normal distribution."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype or self.dtype)

    def forget(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Leaves memory of that size full of NaN behind, which the allocator gives to who asks next: an output that
        is not written all over shows."""
        torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)


def gpu_place() -> Place:
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(
        device=device,
        dtype=torch.bfloat16,
        clock=Clock(device, rounds=20),
        shape=ModelConfig.from_dict(LLAMA_8B),
        attention=(Heads(32, 8, 128, BLOCK_SIZE), Heads(9, 3, 64, 32), Heads(8, 8, 80, 64)),
        checked=((0, 1), (15, 1), (16, 1), (511, 1), (512, 1), (4095, 1), (1000, 3), (0, 300), (2048, 512)),
        decode=(((8191, 1),), ((1023, 1),) * 16, ((2047, 1),) * 64),
        chunks=(((0, 2048),), ((6144, 512),)),
        tokens=(64, 2048),
        moved_blocks=256,
        sampled_rows=64,
        models=("small", "8B"),
    )


def cpu_place() -> Place:
    device = torch.device("cpu")
    return Place(
        device=device,
        dtype=torch.float32,
        clock=Clock(device, rounds=1),
        shape=ModelConfig.from_dict(TINY),
        attention=(Heads(4, 2, 64, BLOCK_SIZE),),
        checked=((0, 1), (15, 1), (63, 1), (30, 4), (0, 9)),
        decode=(((40, 1),),),
        chunks=(((16, 8),),),
        tokens=(2,),
        moved_blocks=3,
        sampled_rows=4,
        models=("tiny",),
    )
