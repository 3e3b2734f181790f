"""Finds a checkpoint, checks its tensors by name and shape, reads them, and gives it a revision."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from kernels.cache import torch_dtype
from kernels.model_config import ModelConfig, UnsupportedModel

# (stage, done, total): called while loading, often enough to show that something moves.
Progress = Callable[[str, int, int], None]

_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Written by old exporters; a function of the config, which is where we take it from.
_DERIVED = re.compile(r"^model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")
_SAMPLE_STRIDE_BYTES, _SAMPLE_BYTES = 1 << 16, 1 << 12


class ModelNotFound(ValueError):
    """There is no such folder, and the hub did not give one either."""


def find_model(model: str) -> Path:
    """The folder of a model: a local path, or a hub id that is fetched (or found in the hub's cache)."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelNotFound(f"--model {model}: neither a folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "tokenizer.model"]))
    except Exception as error:  # the hub library raises many kinds; all mean that there is no model
        raise ModelNotFound(
            f"--model {model}: no folder, and the hub does not give it ({one_line(error)}); "
            "check the name and the network, or give a model folder"
        ) from error


def one_line(error: Exception) -> str:
    """The hub library writes paragraphs; its first sentence says what is wrong."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def resolve_dtype(asked: str, config: ModelConfig) -> torch.dtype:
    """`auto` is the checkpoint's own dtype."""
    return torch_dtype(config.dtype if asked == "auto" else asked)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that the forward pass reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, out_features, in_features, bias in projections:
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class Tensors(Protocol):
    """A model's weights by name (`expected_tensors`), wherever they come from."""

    config: ModelConfig

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """An open safetensors checkpoint, one file or several. Files are mapped; a tensor is read when asked for."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = folder
        self.config = config
        self._files = _weight_files(folder)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        for path in self._files:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in self._where:
                    raise UnsupportedModel(name, str(path), "this tensor is in two files")
                self._where[name] = opened
        self._check_names()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._where.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise UnsupportedModel(name, tensor.dtype, "quantised or non-float weights are not supported")
        return tensor

    def revision(self) -> str:
        """A digest of config and weights: all headers and sizes, and one page of each 64 KiB of the data.

        Whole files would cost seconds on large models; training touches every page of a tensor, so pages tell.
        """
        digest = hashlib.blake2b((self.folder / "config.json").read_bytes(), digest_size=16)
        for path in self._files:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}:".encode())
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                digest.update(file.read(header_bytes))
                for start in range(8 + header_bytes, size, _SAMPLE_STRIDE_BYTES):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def _check_names(self) -> None:
        expected = expected_tensors(self.config)
        for name, shape in expected.items():
            if name not in self._where:
                raise UnsupportedModel(name, None, "this tensor is missing from the checkpoint")
            found = tuple(self._where[name].get_slice(name).get_shape())
            if found != shape:
                raise UnsupportedModel(name, found, f"the config asks for shape {shape}")
        for name in self._where:
            if name not in expected and not _DERIVED.match(name):
                self._check_extra(name)

    def _check_extra(self, name: str) -> None:
        if name == "lm_head.weight" and torch.equal(
            self.tensor(name), self.tensor("model.embed_tokens.weight")
        ):
            return  # tied, and written twice
        raise UnsupportedModel(name, "unexpected tensor", "the config does not account for it")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    for path in files:
        if path.parent != folder or not path.is_file():
            raise ModelNotFound(f"weights {path} do not exist; safetensors is the only format read")
    return files


def each_layer(config: ModelConfig, progress: Progress | None) -> Iterator[int]:
    """Layer numbers, reported as they are asked for."""
    for layer in range(config.num_layers):
        if progress is not None:
            progress("layers", layer, config.num_layers)
        yield layer
    if progress is not None:
        progress("layers", config.num_layers, config.num_layers)
