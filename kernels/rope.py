"""Rotary embedding: frequencies from the config, a table of angles, the rotation (torch reference)."""

from dataclasses import dataclass

import torch

from kernels.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos` and `sin`, each `[length, head_dim / 2]` fp32, the variant's attention factor multiplied in.

    Why a table: cos and sin have other bits in the tail of a vectorised loop than in its body. Computed in
    float64 and rounded once they are the same for any length of table.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def make_rope_table(config: ModelConfig, length: int, device: torch.device) -> RopeTable:
    frequencies, attention_factor = _frequencies(config)
    positions = torch.arange(length, dtype=torch.float32)
    # The angle is an fp32 product, as in the models' own code; a float64 one would be another model.
    angles = (positions[:, None] * frequencies[None, :]).double()
    return RopeTable(
        cos=(angles.cos().float() * attention_factor).to(device),
        sin=(angles.sin().float() * attention_factor).to(device),
    )


def _frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    rope = dict(config.rope)
    if config.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(rope["rope_theta"]) ** exponents), 1.0
    # Imported here: transformers' config classes take 2 s to import, and most models never need them.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    proxy = LlamaConfig(
        hidden_size=config.head_dim * config.num_heads,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[config.rope_type](proxy, torch.device("cpu"))
    return frequencies.float(), float(attention_factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + half). x `[tokens, heads, head_dim]` fp32, cos and sin `[tokens, head_dim / 2]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
