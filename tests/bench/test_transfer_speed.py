"""The bench of transfers: each way moves its blocks, and what is written down is of the rounds that were run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.transfer_speed import COPY, WAYS, Speed, main, rows_of


def test_ways_are_measured_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    asked, ways = ["--block-bytes", "4096", "--blocks", "24", "--rounds", "2"], [COPY, "shm", "zeromq"]
    assert main([*asked, "--json", str(out), "--ways", *ways]) == 0
    result = json.loads(out.read_text())
    assert [row["way"] for row in result["rows"]] == ways
    for row in result["rows"]:
        assert row["us"] > 0 and len(row["rounds_us"]) == 2 and row["sender_cpu_us"] > 0
        assert (row["ratio"] is None) == (not row["against"])
    assert result["blocks"] == 24 and "revision" in result["surroundings"]
    assert "shm" in capsys.readouterr().out


def test_a_ratio_is_of_the_same_round() -> None:
    """A machine that is ten times slower in one round is so for both."""
    copy, shm = WAYS[0], WAYS[1]
    speeds = [
        Speed(copy, [1e-5, 1e-4, 2e-5], [0.0] * 3, [0.0] * 3),
        Speed(shm, [2e-5, 2e-4, 2e-5], [1e-6] * 3, [2e-6] * 3),
    ]
    _, row = rows_of(speeds, 100_000)
    assert row["ratio"] == 0.5 and row["us"] == 20.0 and row["gb_per_s"] == 5.0
    assert (row["sender_cpu_us"], row["receiver_cpu_us"]) == (1.0, 2.0)
