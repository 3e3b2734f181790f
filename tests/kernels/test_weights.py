"""A checkpoint must hold exactly the tensors that its config asks for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.model_config import ModelConfig, UnsupportedModel
from kernels.weights import Checkpoint, ModelNotFound, find_model
from tests.kernels.tiny_models import save_model

_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
_Q = "model.layers.1.self_attn.q_proj.weight"


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, ModelConfig.from_folder(folder))


def _change(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_tensors_by_name_and_shape(tmp_path: Path) -> None:
    save_model("llama-mha-untied", tmp_path)
    _open(tmp_path)
    _change(tmp_path, **{_Q: torch.zeros(48, 47)})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.q_proj.*\(48, 47\)"):
        _open(tmp_path)
    _change(tmp_path, **{_Q: None})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.q_proj.*missing"):
        _open(tmp_path)
    _change(tmp_path, **{_Q: torch.zeros(48, 48), "model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(UnsupportedModel, match="sinks"):
        _open(tmp_path)


def test_a_head_beside_tied_embeddings_must_be_the_embeddings(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")[_EMBED]
    _change(
        tmp_path, **{_HEAD: embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    _open(tmp_path)
    _change(tmp_path, **{_HEAD: embedding + 1})
    with pytest.raises(UnsupportedModel, match="lm_head"):
        _open(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_model("llama-mha-untied", tmp_path)
    _change(tmp_path, **{_Q: torch.zeros(48, 48, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match="int8"):
        _open(tmp_path).tensor(_Q)


def test_the_revision_follows_weights_and_config(tmp_path: Path) -> None:
    save_model("llama-mha-untied", tmp_path)
    first = _open(tmp_path).revision()
    assert first == _open(tmp_path).revision()
    _change(tmp_path, **{_Q: torch.zeros(48, 48)})
    second = _open(tmp_path).revision()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("2048", "1024"))
    assert len({first, second, _open(tmp_path).revision()}) == 3


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither"):
        find_model(str(tmp_path / "absent"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    save_model("llama-mha-untied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="safetensors"):
        _open(tmp_path)
