"""Every config field is honoured, without effect, or refused by name."""

from typing import Any

import pytest

from kernels.model_config import ModelConfig, UnsupportedModel

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_QWEN2 = {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_MISTRAL = {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def test_llama_with_defaults() -> None:
    config = ModelConfig.from_dict(_LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (16, 2, False)
    assert dict(config.rope) == {"rope_type": "default", "rope_theta": 10000.0}
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_what_the_architectures_differ_in() -> None:
    qwen2, qwen3 = ModelConfig.from_dict(_QWEN2), ModelConfig.from_dict(_QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 16)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    biased = ModelConfig.from_dict({**_LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_smollm2_config_of_the_hub() -> None:
    fields = {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000}
    config = ModelConfig.from_dict({**_LLAMA, **fields, "transformers.js_config": {"x": 1}})
    assert dict(config.rope)["rope_theta"] == 100000


@pytest.mark.parametrize(
    ("base", "change", "field"),
    [
        (_LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        (_LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        (_LLAMA, {"model_type": "mistral"}, "model_type"),
        (_LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (_LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (_LLAMA, {"logit_scale": 0.5}, "logit_scale"),
        (_LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (_LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (_LLAMA, {"vocab_size": None}, "vocab_size"),
        (_LLAMA, {"vocab_size": 1 << 19}, "vocab_size"),  # one id more than the sums of sampling hold
        (_LLAMA, {"hidden_size": "64"}, "hidden_size"),
        (_LLAMA, {"hidden_size": 66}, "hidden_size"),
        (_LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (_LLAMA, {"head_dim": 15}, "head_dim"),
        (_LLAMA, {"sliding_window": 128}, "sliding_window"),
        (_LLAMA, {"dtype": "float8_e4m3fn"}, "dtype"),
        (_LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        (_LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
        (_LLAMA, {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        (_LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_scaling.x"),
        (_MISTRAL, {"attention_bias": True}, "attention_bias"),
        (_QWEN2, {"attention_bias": True}, "attention_bias"),
        (_QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (_QWEN3, {"mlp_bias": True}, "mlp_bias"),
        (_QWEN3, {"num_experts": 8}, "num_experts"),
    ],
)
def test_refusals_name_field_and_value(base: dict[str, Any], change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        ModelConfig.from_dict({**base, **change})
    assert refused.value.field == field
    assert field in str(refused.value) and repr(refused.value.value) in str(refused.value)


def test_a_sliding_window_is_exact_up_to_its_length() -> None:
    config = ModelConfig.from_dict({**_MISTRAL, "sliding_window": 256})
    assert config.served_length(256) == 256
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        config.served_length(257)
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        config.served_length(None)
    unused = ModelConfig.from_dict({**_QWEN2, "sliding_window": 16, "use_sliding_window": False})
    assert unused.served_length(None) == 512


def test_no_longer_than_the_model_is_defined() -> None:
    with pytest.raises(UnsupportedModel, match="max_position_embeddings"):
        ModelConfig.from_dict(_LLAMA).served_length(513)
