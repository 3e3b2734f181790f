"""Models of random weights, made where they are used: the same numbers in every process on one kind of device."""

from __future__ import annotations

import zlib

import torch

from bench.gpu_check.places import BLOCK_SIZE, MODELS, Place
from kernels.backend import choose_backend
from kernels.cache import CacheLayout, PagedCache, PoolMemory
from kernels.device import OnGpu
from kernels.model import CausalModel, load_model
from kernels.model_config import ModelConfig
from kernels.runner import ModelRunner
from kernels.weights import expected_tensors

STEP_TOKENS = 2048


class RandomTensors:
    """`Tensors` (kernels/weights.py): norms near 1, the rest such that numbers keep their size from layer to layer."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self._device, self._dtype = device, dtype
        self._shapes = expected_tensors(config)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        if len(shape) == 1:
            return 1 + 0.1 * noise
        # Embeddings of size 1; a row of any other weight of length 1, so that its products have size 1 too.
        return noise if name == "model.embed_tokens.weight" else noise.mul_(shape[1] ** -0.5)


def make_model(name: str, place: Place) -> CausalModel:
    """For sequences of all its length."""
    config = ModelConfig.from_dict(MODELS[name])
    length = config.max_position_embeddings
    backend = choose_backend(place.device, config.head_dim, BLOCK_SIZE, 1, place.dtype, length, "triton")
    tensors = RandomTensors(config, place.device, place.dtype)
    with torch.inference_mode():
        return load_model(tensors, place.dtype, place.device, backend, length, threads=1)


def make_runner(
    model: CausalModel,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    eager: bool,
    memory: PoolMemory | None = None,
) -> ModelRunner:
    """Runners of one process may share a model. `memory` is a pool's on a CPU."""
    config = model.config
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    layout = CacheLayout(*heads, BLOCK_SIZE, model.dtype, token_major=True)
    cache = PagedCache(layout, num_blocks, model.device, memory)
    gpu = OnGpu(step_tokens=STEP_TOKENS, eager=eager)
    return ModelRunner(model, cache, max_num_seqs, max_model_len, 1, "random", None, gpu)
