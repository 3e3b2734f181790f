"""Finds the model of this service, by starting `python -m kernels.default_model` where none was named.

The coordinator may not import `kernels` (torch would come with it), so it asks as a person would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common.errors import ModelCannotBeLoaded
from common.paths import child_environment
from common.process_settings import DEFAULT_MODEL_NAME


def resolve_model(model: str | None) -> str:
    """A folder's absolute path, or the hub id as it was given. Fetches the default model on first use.

    Raises ModelCannotBeLoaded where the default model cannot be had or a path holds none.
    """
    if model is None:
        return _default_model()
    if (Path(model) / "config.json").is_file():
        return str(Path(model).absolute())
    if Path(model).exists():
        raise ModelCannotBeLoaded(f"--model {model}: no config.json in it")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelCannotBeLoaded(
            f"--model {model}: no such folder; give a model folder or a hub id (owner/name), "
            f"or leave it out for {DEFAULT_MODEL_NAME}"
        )
    return model


def local_folder(model: str) -> Path:
    """The folder with the model's tokenizer files: `model` itself, or those files of a hub id.

    Raises ModelCannotBeLoaded.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # only here: it takes a while to import

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "tokenizer.model"]))
    except (
        Exception
    ) as error:  # the library raises many kinds, in paragraphs; all mean that there is no model
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelCannotBeLoaded(
            f"--model {model}: not a folder, and the hub does not give it ({why}); "
            "check the name and the network, or give a model folder"
        ) from error


def _default_model() -> str:
    """Its progress goes to our stderr, the folder comes on its stdout."""
    command = [sys.executable, "-P", "-m", "kernels.default_model"]
    with (
        _signals_interrupt(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env=child_environment(os.environ), text=True
        ) as maker,
    ):
        try:
            said, _ = maker.communicate()
        finally:
            maker.terminate()  # nothing left to end unless we were interrupted
    if maker.returncode != 0:
        raise ModelCannotBeLoaded("the default model is not there, see above; --model takes a folder instead")
    return said.strip().splitlines()[-1]


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and Ctrl-C unwind in here, so that the fetching child is ended with us."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
