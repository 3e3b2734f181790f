"""The kernel bench on a random model of two layers: it runs, it compares, and it says what it found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench.kernel_case import Case, WrongResult, measure
from bench.kernel_roofs import Roofs
from bench.kernel_speed import main

ROOFS = Roofs(1e9, "none", 1, 2e9, 1, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_is_compared_timed_and_written_down(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "speed"
    assert main(["--tiny", "--dtype", dtype, "--seconds", "0.002", "--out", str(out)]) == 0
    torch.set_num_threads(threads)
    said = json.loads(out.with_suffix(".json").read_text())
    assert said["settings"]["dtype"] == said["roofs"]["dtype"] == dtype
    assert said["where"]["cores"] > 0 and said["roofs"]["read_bytes_per_s"] > 0
    kinds = {one["kernel"].split(",")[0].split(" 1")[0].split(" 5")[0] for one in said["kernels"]}
    assert kinds == {
        *("linear", "output head", "decode attention", "chunk attention", "add and RMS norm", "SiLU · up"),
        *("rope and cache write", "sampling", "decode step", "prompt"),
    }
    for one in said["kernels"]:
        assert one["run_ms"] > 0 and one["reference_ms"] > 0 and one["floor_ms"] > 0, one
        assert one["over_floor"] == pytest.approx(one["run_ms"] / one["floor_ms"])
    assert "decode step" in capsys.readouterr().out


def test_a_fast_wrong_kernel_is_no_result() -> None:
    right = Case(
        "k", "1 row", lambda: None, lambda: None, lambda: 0.01, 0.01, 10**6, 10**6, reference_times=1000
    )
    found = measure(right, ROOFS, 0.0)
    assert found.floor_ms == 1.0 and found.over_floor == found.run_ms  # bytes are the longer of the two here
    assert found.speedup > 100
    assert measure(dataclasses.replace(right, operations=10**7), ROOFS, 0.0).floor_ms == 5.0
    roof = ROOFS.or_better(dataclasses.replace(ROOFS, flops_per_s=1e6, square=9, read_bytes_per_s=2e9))
    assert (roof.read_bytes_per_s, roof.flops_per_s, roof.square) == (2e9, 2e9, 1)
    assert found.under(roof).floor_ms == pytest.approx(0.5)  # bytes and operations take as long now
    for wrong in (lambda: 0.011, lambda: float("nan")):
        with pytest.raises(WrongResult, match="k, 1 row"):
            measure(dataclasses.replace(right, check=wrong), ROOFS, 0.0)
