"""What a step of a model has to read and to compute, by the shape of the model alone.

The floor of a step, as the project's targets define it: every weight is read once (the output head with its rows, the
embedding table not), and so are the keys and values of the context; or all multiply-adds are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.model_config import ModelConfig


def layer_weights(config: ModelConfig) -> int:
    """Elements of the four products of a layer."""
    attended, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * attended + 2 * kv + 3 * config.intermediate_size)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a step reads of them."""
    head = config.vocab_size * config.hidden_size
    return (config.num_layers * layer_weights(config) + head) * dtype.itemsize


def step_operations(config: ModelConfig, rows: int, start: int, count: int) -> int:
    """A multiply-add is two. Each row has `count` query tokens after `start`, and one of them gets logits."""
    seen = count * start + count * (count + 1) // 2
    attention = config.num_layers * 4 * seen * config.num_heads * config.head_dim
    head = 2 * config.vocab_size * config.hidden_size
    return rows * (2 * count * config.num_layers * layer_weights(config) + attention + head)
