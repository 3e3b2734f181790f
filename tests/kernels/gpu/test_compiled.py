"""Every Triton kernel compiles for GPUs that are not here, without spills beyond what its entry allows.

In processes of their own: this one runs kernels in the interpreter, and has no compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu.ahead_of_time import recording

ROOT = Path(__file__).resolve().parents[3]


def without_interpreter(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ended = without_interpreter(
        "-m", "tests.kernels.gpu.probe_kernels", cache=tmp_path_factory.mktemp("triton")
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return {name: one for name, (one,) in found.items()}


def test_fused_float64_is_seen_and_launching_without_fusion_has_none(probes: dict[str, Any]) -> None:
    assert probes["fused"]["fma_f64"] > 0
    assert probes["unfused"]["fma_f64"] == 0


def test_what_is_not_rounded_once_in_float32_is_seen(probes: dict[str, Any]) -> None:
    assert any(name.startswith("fma.rn") for name in probes["fused f32"]["inexact_f32"])
    assert any(name.startswith("div.full") for name in probes["divided"]["inexact_f32"])
    assert probes["divided once"]["inexact_f32"] == []


def test_a_block_number_multiplied_in_32_bits_is_seen(probes: dict[str, Any]) -> None:
    assert len(probes["narrow"]["narrow_products"]) == probes["narrow"]["block_loads"] == 1
    assert (probes["wide"]["narrow_products"], probes["wide"]["block_loads"]) == ([], 1)


def test_spills_are_seen(probes: dict[str, Any]) -> None:
    assert probes["spilling"]["spill_bytes"] > 0
    assert probes["wide"]["spill_bytes"] == 0
    assert 0 < probes["wide"]["registers"] <= 255


def test_every_kernel_compiles_and_keeps_the_rules(tmp_path: Path) -> None:
    out = tmp_path / "compiled.json"
    ended = without_interpreter("-m", "bench.gpu_kernels_compiled", "--out", str(out), cache=tmp_path)
    assert out.exists(), ended.stderr
    found = json.loads(out.read_text())
    print(ended.stdout)
    assert [(row["kernel"], row["label"], row["faults"]) for row in found["kernels"] if row["faults"]] == []
    assert ended.returncode == 0
    # As many families as are there were compiled, each for both chips.
    compiled = {row["family"] for row in found["kernels"]}
    there = {path.stem for path in (ROOT / "kernels" / "gpu").glob("*.py") if "_kernel[" in path.read_text()}
    assert compiled == there
    assert not found["uncatalogued"]
    assert {row["capability"] for row in found["kernels"]} == {80, 90}


def test_nothing_is_recorded_under_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), recording():
        pass
