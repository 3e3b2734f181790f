"""The bench of transfers: each way moves its blocks, and what is written down is of the rounds that were run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.transfer_speed import AS_IT_COMES, COPY, MEMORY_KEPT, WAYS, Speed, main, rows_of, table_of


def test_ways_are_measured_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    asked, ways = ["--block-bytes", "4096", "--blocks", "24", "--rounds", "2"], [COPY, "shm", MEMORY_KEPT]
    assert main([*asked, "--json", str(out), "--ways", *ways]) == 0
    result = json.loads(out.read_text())
    assert [row["way"] for row in result["rows"]] == ways
    for row in result["rows"]:
        assert row["us"] > 0 and len(row["rounds_us"]) == 2 and row["sender_cpu_us"] > 0
    assert [list(row["ratios"]) for row in result["rows"]] == [[], [COPY], []]
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
    assert row["ratios"] == {COPY: 0.5} and row["us"] == 20.0 and row["gb_per_s"] == 5.0
    assert (row["sender_cpu_us"], row["receiver_cpu_us"]) == (1.0, 2.0)


def test_tcp_is_compared_with_zeromq_as_it_comes_and_with_our_setting_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A baseline without the setting that production has would be the easier one."""
    by_name = {way.name: way for way in WAYS}
    assert (by_name[AS_IT_COMES].keeps_memory, by_name[MEMORY_KEPT].keeps_memory) == (False, True)
    assert by_name["tcp"].keeps_memory and by_name["tcp"].target == 0.8
    seconds = {AS_IT_COMES: 1e-4, MEMORY_KEPT: 7e-5, "tcp": 1e-4}
    speeds = [Speed(by_name[name], [each], [0.0], [0.0]) for name, each in seconds.items()]
    rows = rows_of(speeds, 100_000)
    assert rows[-1]["ratios"] == {AS_IT_COMES: 1.0, MEMORY_KEPT: 0.7}
    Console(width=200).print(table_of(rows, 100_000))
    said = capsys.readouterr().out
    assert "1.00 of zeromq, as it comes" in said and "0.70 of zeromq, memory kept" in said
    assert "≥ 0.8 yes" in said and "≥ 0.8 NO" in said
