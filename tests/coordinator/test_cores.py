from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cores import available_cores, share_cores


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [
        (2, 2, [(1, 1)] * 2),
        (8, 2, [(4, 4)] * 2),
        (7, 2, [(4, 3), (3, 3)]),
        (2, 4, [(1, 1)] * 4),
        (8, 4, [(2, 2)] * 4),
        (8, 3, [(3, 3), (3, 3), (2, 2)]),
        (1, 1, [(1, 0)]),
        (8, 1, [(8, 0)]),
    ],
)
def test_cores_are_shared_and_nobody_goes_without(
    cores: int, workers: int, threads: list[tuple[int, int]]
) -> None:
    assert [(each.own, each.spare) for each in share_cores(cores, workers)] == threads


@pytest.mark.parametrize(("text", "limit"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)])
def test_a_containers_quota_counts(tmp_path: Path, text: str, limit: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    without = available_cores(tmp_path / "absent")
    assert without >= 1
    assert available_cores(tmp_path / "cpu.max") == (limit or without)
