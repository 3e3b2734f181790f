"""Small random checkpoints of each architecture, written the way transformers writes them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name: (model class, config class, fields). Sizes are odd on purpose: GQA 1 to 8, head_dim apart from hidden / heads.
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama-mha-untied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 48, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "llama-gqa3-tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 72,
            "intermediate_size": 132,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "llama-biases-head-dim": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "yarn-rope": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": None,
        },
    ),
    "qwen2-biases": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"hidden_size": 96, "intermediate_size": 136, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "qwen3-qk-norm": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "hidden_size": 64,
            "intermediate_size": 104,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
    ),
}


def make_model(name: str, **changes: Any) -> PreTrainedModel:
    """A model with seeded weights. Biases and norms are not left at their neutral starting values."""
    model_class, config_class, fields = ARCHITECTURES[name]
    model: PreTrainedModel = model_class(config_class(**{**_COMMON, **fields, **changes})).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise if parameter.mean() == 1.0 else 0.3 * noise)
            else:
                parameter.copy_(
                    noise * (2.0 / parameter.shape[1] ** 0.5 if parameter.shape[0] != 211 else 0.5)
                )
    return model


def save_model(name: str, folder: Path, max_shard_size: str = "5GB", **changes: Any) -> PreTrainedModel:
    model = make_model(name, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
