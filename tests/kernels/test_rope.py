"""Angles and rotation against transformers' own; each variant is also compared end to end in test_model."""

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.model_config import ModelConfig
from kernels.rope import make_rope_table, rotate

_RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}


def test_the_table_is_the_models_own_and_does_not_depend_on_its_length() -> None:
    table = make_rope_table(ModelConfig.from_dict(_RAW), 8192, torch.device("cpu"))
    reference = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in _RAW.items() if k != "architectures"}))
    cos, sin = reference(torch.zeros(1), torch.arange(8192)[None])
    torch.testing.assert_close(table.cos, cos[0, :, :12], atol=2e-7, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :12], atol=2e-7, rtol=0)
    short = make_rope_table(ModelConfig.from_dict(_RAW), 333, torch.device("cpu"))
    assert torch.equal(short.cos, table.cos[:333]) and torch.equal(short.sin, table.sin[:333])


def test_rotation() -> None:
    table = make_rope_table(ModelConfig.from_dict(_RAW), 50, torch.device("cpu"))
    x = torch.randn(50, 4, 24)
    cos, sin = torch.cat([table.cos] * 2, -1)[None], torch.cat([table.sin] * 2, -1)[None]
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, table.cos, table.sin), wanted[0].transpose(0, 1))
