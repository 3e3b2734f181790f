"""What every folder of tests may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.default_model import ensure_default_model, terminal_progress


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model as a Hugging Face folder, fetched and converted where this machine has none yet."""
    with terminal_progress() as progress:
        return ensure_default_model(progress)
