"""What every folder of tests may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.default_model import ensure_default_model, terminal_progress

# Triton decides when it is first imported, for its own library of kernels too, whether they run in its interpreter; and
# what a test imports may bring it along. A CPU has nothing else.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model as a Hugging Face folder, fetched and converted where this machine has none yet."""
    with terminal_progress() as progress:
        return ensure_default_model(progress)
