"""What a checkpoint's config.json asks of the forward pass, or a refusal that names the field.

Why a list of known fields instead of a library's config class: such classes take unknown fields silently, and a
model served with an ignored field answers wrongly without an error. Every field here is honoured, proven to have
no effect on inference, or refused. It also keeps the import of transformers (1.9 s) out of most starts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_VOCAB = (1 << 19) - 1  # of a sampler's whole weights (kernels/sampling.py) that many fit into 64 bits


class UnsupportedModel(ValueError):
    """The checkpoint asks for something this forward pass does not do. `field` and `value` name it."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"unsupported model: {field} = {value!r}: {why}")
        self.field = field
        self.value = value


@dataclass(frozen=True, slots=True)
class _Family:
    """How one architecture differs from Llama, and the defaults of the fields it may leave out."""

    model_type: str
    qkv_bias: bool = False  # always there, whatever attention_bias says
    qk_norm: bool = False
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    has_use_sliding_window: bool = False
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / heads
    default_sliding_window: int | None = None


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", has_attention_bias=True, has_mlp_bias=True),
    "MistralForCausalLM": _Family("mistral", default_kv_heads=8, default_sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, has_use_sliding_window=True, default_kv_heads=32),
    "Qwen3ForCausalLM": _Family(
        "qwen3",
        qk_norm=True,
        has_attention_bias=True,
        has_use_sliding_window=True,
        default_kv_heads=32,
        default_head_dim=128,
    ),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that change nothing at inference: training, bookkeeping, output format of other programs.
_WITHOUT_EFFECT = _words(
    """
    attention_dropout initializer_range use_cache transformers_version _name_or_path name_or_path
    pad_token_id bos_token_id eos_token_id pretraining_tp return_dict output_hidden_states
    output_attentions torchscript id2label label2id problem_type is_llama_config transformers.js_config
    _attn_implementation attn_implementation chunk_size_feed_forward unsloth_fixed unsloth_version
    torch_dtype dtype max_window_layers
    """
)

# Fields that would change the computation unless they have exactly this value.
_NEUTRAL: dict[str, object] = {
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "hidden_act": "silu",
}

_READ = _words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings rope_theta rope_scaling rope_parameters attention_bias mlp_bias sliding_window
    use_sliding_window layer_types
    """
)

_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": _words(
        """
    factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
    truncate
    """
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know. `rope` holds transformers' `rope_parameters`, sorted by name."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    rope: tuple[tuple[str, float | int | str | bool], ...]
    dtype: str

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        path = folder / "config.json"
        if not path.is_file():
            raise UnsupportedModel("config.json", str(path), "the model folder has no such file")
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed config.json. Raises `UnsupportedModel` naming the first field it cannot honour."""
        architecture, family = _family(raw)
        _refuse_unknown(raw)
        hidden_size, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        kv_heads = raw.get("num_key_value_heads") or family.default_kv_heads or heads
        if heads % kv_heads:
            raise UnsupportedModel(
                "num_key_value_heads", kv_heads, f"does not divide num_attention_heads = {heads}"
            )
        head_dim = raw.get("head_dim") or family.default_head_dim or _divided(hidden_size, heads)
        if head_dim % 2:
            raise UnsupportedModel("head_dim", head_dim, "rotary embedding needs an even head_dim")
        attention_bias = _flag(raw, "attention_bias", family.has_attention_bias)
        return cls(
            architecture=architecture,
            vocab_size=_vocab_size(raw),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_size(raw, "max_position_embeddings"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=_flag(raw, "mlp_bias", family.has_mlp_bias),
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(raw, family),
            rope=_rope(raw),
            dtype=_dtype(raw),
        )

    @property
    def rope_type(self) -> str:
        return str(dict(self.rope)["rope_type"])

    def served_length(self, asked: int | None) -> int:
        """The longest sequence to serve, in tokens: what was asked, or the model's own length.

        Raises `UnsupportedModel` where the model is not defined that far, or is only with a sliding window.
        """
        length = self.max_position_embeddings if asked is None else asked
        if length > self.max_position_embeddings:
            raise UnsupportedModel(
                "max_position_embeddings",
                self.max_position_embeddings,
                f"shorter than the asked length {length}",
            )
        if self.sliding_window is not None and self.sliding_window < length:
            raise UnsupportedModel(
                "sliding_window",
                self.sliding_window,
                f"shorter than the served length {length}; --max-model-len {self.sliding_window} or less is exact",
            )
        return length


def _family(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or []
    if not names:
        by_type = {family.model_type: name for name, family in _FAMILIES.items()}
        if raw.get("model_type") not in by_type:
            raise UnsupportedModel("model_type", raw.get("model_type"), f"known: {', '.join(by_type)}")
        names = [by_type[raw["model_type"]]]
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise UnsupportedModel("architectures", names, f"known: {', '.join(_FAMILIES)}")
    family = _FAMILIES[names[0]]
    if raw.get("model_type", family.model_type) != family.model_type:
        raise UnsupportedModel("model_type", raw["model_type"], f"{names[0]} is of type {family.model_type}")
    return names[0], family


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    for field in raw:
        value = raw[field]
        if value is None or field in _READ or field in _WITHOUT_EFFECT:
            continue
        if field not in _NEUTRAL:
            raise UnsupportedModel(field, value, "this field is not known, so its effect would be ignored")
        if value != _NEUTRAL[field]:
            raise UnsupportedModel(field, value, f"only {_NEUTRAL[field]!r} is supported")


def _size(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(field, value, "a positive whole number is needed")
    return value


def _vocab_size(raw: Mapping[str, Any]) -> int:
    size = _size(raw, "vocab_size")
    if size > MAX_VOCAB:
        raise UnsupportedModel("vocab_size", size, f"more than {MAX_VOCAB} ids cannot be sampled exactly")
    return size


def _divided(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise UnsupportedModel("hidden_size", hidden_size, f"not a multiple of num_attention_heads = {heads}")
    return hidden_size // heads


def _flag(raw: Mapping[str, Any], field: str, honoured: bool) -> bool:
    """A bias switch. Where the architecture has no such switch, a set one is a model we would misread."""
    value = bool(raw.get(field) or False)
    if value and not honoured:
        raise UnsupportedModel(field, raw[field], "this architecture has no such bias")
    return value


def _sliding_window(raw: Mapping[str, Any], family: _Family) -> int | None:
    layer_types = raw.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise UnsupportedModel("layer_types", layer_types, "only full_attention layers are supported")
    if family.has_use_sliding_window and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window", family.default_sliding_window)
    if window is None:
        return None
    if family.model_type == "llama":
        raise UnsupportedModel("sliding_window", window, "this architecture has no sliding window")
    return _size({"sliding_window": window}, "sliding_window")


def _rope(raw: Mapping[str, Any]) -> tuple[tuple[str, float | int | str | bool], ...]:
    """`rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before), as one sorted tuple."""
    scaling, given = raw.get("rope_scaling"), raw.get("rope_parameters")
    if scaling and given and scaling != given:
        raise UnsupportedModel("rope_scaling", scaling, f"contradicts rope_parameters = {given!r}")
    field = "rope_scaling" if scaling else "rope_parameters"
    parameters = {name: value for name, value in dict(scaling or given or {}).items() if value is not None}
    rope_type = parameters.pop("type", None)
    rope_type = parameters.setdefault("rope_type", rope_type or "default")
    if rope_type not in _ROPE_FIELDS:
        raise UnsupportedModel(f"{field}.rope_type", rope_type, f"supported: {', '.join(_ROPE_FIELDS)}")
    if parameters.get("partial_rotary_factor") == 1.0:
        del parameters["partial_rotary_factor"]
    parameters.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    for name, value in parameters.items():
        if name not in _ROPE_FIELDS[rope_type] and name not in ("rope_type", "rope_theta"):
            raise UnsupportedModel(f"{field}.{name}", value, f"not a parameter of rope type {rope_type}")
        if not isinstance(value, (int, float, str, bool)):
            raise UnsupportedModel(f"{field}.{name}", value, "a plain number is needed")
    return tuple(sorted(parameters.items()))


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedModel("dtype", name, "supported: bfloat16, float16, float32")
    return name
