"""The command as a person types it, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.paths import child_environment, project_root, require_own_folders
from common.version import VERSION
from coordinator.launcher import reserve_port


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with reserve_port("127.0.0.1") as held:
        yield held.getsockname()[1]


def kvferry(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "coordinator.cli", *argv]
    environ = child_environment(os.environ)
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, cwd=cwd)


def test_version_and_help() -> None:
    assert kvferry("--version").stdout == f"kvferry {VERSION}\n"
    for argv in ((), ("--help",)):
        shown = kvferry(*argv)
        assert shown.returncode == 0
        assert all(
            word in shown.stdout for word in ("serve", "coordinator", "prefill", "decode", "bench", "status")
        )
    assert "--prefill N" in kvferry("serve", "--help").stdout
    assert "not in this release" in next(line for line in kvferry().stdout.splitlines() if " bench " in line)


def test_tier_keys_without_effect_are_said_once(tmp_path: Path) -> None:
    config = tmp_path / "kvferry.toml"
    config.write_text("[tiers.gold]\nweight = 4\npriority = 1\n[tiers.tin]\nttft_ms = 9\npriority = 2\n")
    ended = kvferry("coordinator", "--config", str(config), "--model", "/nowhere/model")
    assert ended.returncode == 4
    assert [line.split(": ")[-1] for line in ended.stderr.splitlines() if line.startswith("WARNING")] == [
        "gold.weight, tin.ttft_ms"
    ]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["srve"], 2, "did you mean serve?"),
        (["serve", "--prot", "1"], 2, "did you mean --port?"),
        (["serve", "--host", "0.0.0.0"], 2, "--allow-unauthenticated"),
        (["serve", "--model", "/nowhere/model"], 4, "/nowhere/model: no such folder"),
        (["serve", "--model", "nope"], 4, "--model nope: no such folder; give a model folder"),
    ],
)
def test_faults_are_one_line_with_the_code_of_the_contract(argv: list[str], code: int, words: str) -> None:
    ended = kvferry(*argv)
    assert ended.returncode == code
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""


def test_status_of_nobody_is_one_line(silent_port: int) -> None:
    ended = kvferry("status", "--url", f"http://127.0.0.1:{silent_port}")
    assert ended.returncode == 1
    assert "refused" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_folders_of_the_same_name_where_a_person_stands_are_not_ours(tmp_path: Path) -> None:
    for name in ("common", "kernels", "transfer", "coordinator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    assert kvferry("--version", cwd=tmp_path).stdout == f"kvferry {VERSION}\n"


def test_somebody_elses_package_of_our_name_is_noticed(tmp_path: Path) -> None:
    require_own_folders()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(project_root())!r}]; "
    script += "from common.paths import require_own_folders; require_own_folders()"
    ended = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert "BadConfiguration" in ended.stderr
    assert "in a Python environment of its own" in ended.stderr
