"""A worker's settings of a GPU reach its model, from the command line on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import parse_worker
from common.errors import BadConfiguration
from kernels import loading
from kernels.cache import AskedTooMuch
from kernels.device import OnGpu
from transfer.worker_process import DEVICE_STEP_TOKENS, _load


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> OnGpu:
    """What a runner is told by a worker with these flags; the model itself is not loaded."""
    found: list[OnGpu] = []

    def load(model: str, *, gpu: OnGpu, **_: Any) -> None:
        found.append(gpu)
        raise AskedTooMuch("that is enough")

    monkeypatch.setattr(loading, "load_runner", load)
    settings = parse_worker(["--model", str(folder), *flags], "decode")
    with pytest.raises(BadConfiguration, match="that is enough"):
        _load(settings, 1, loading.load_for_worker, None)
    return found[0]


def test_flags_of_a_gpu_reach_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert told(monkeypatch, tmp_path) == OnGpu(0.9, DEVICE_STEP_TOKENS, eager=False, fast_chunks=False)
    flags = ("--attention-variant", "fast", "--enforce-eager", "--gpu-memory-utilization", "0.4")
    wanted = OnGpu(0.4, 96, eager=True, fast_chunks=True)
    assert told(monkeypatch, tmp_path, *flags, "--max-num-batched-tokens", "96") == wanted
