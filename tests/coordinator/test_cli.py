"""The command as a person types it, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.paths import child_environment, project_root, require_own_folders
from common.version import VERSION
from coordinator.cli import main
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
    assert "--request-rate" in kvferry("bench", "--help").stdout


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


def test_a_command_that_is_interrupted_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with 1 and without a word."""
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        url = f"http://127.0.0.1:{never_answers.getsockname()[1]}"
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        ctrl_c = threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT))
        ctrl_c.start()
        assert main(["status", "--url", url]) == 1
    assert capsys.readouterr().err == "kvferry status: interrupted\n"


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


@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_a_bad_flag_is_said_before_torch_is_read(command: str) -> None:
    """It took five to nine seconds, most of them torch's."""
    environ = child_environment(os.environ) | {"PYTHONPROFILEIMPORTTIME": "1"}
    argv = [sys.executable, "-P", "-m", f"{command}_node", "--dtyp", "float32"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ)
    assert ended.returncode == 2 and "did you mean --dtype?" in ended.stderr
    imported = {line.split("|")[-1].strip() for line in ended.stderr.splitlines() if "|" in line}
    assert "common.config" in imported and not imported & {"torch", "zmq", "numpy"}


@pytest.mark.parametrize("module", ["prefill_node", "decode_node", "coordinator", "coordinator.cli"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_leave_while_starting_leaves_cleanly(module: str, number: signal.Signals) -> None:
    """As early as its first import of weight: it ended by the signal, without a word."""
    environ = child_environment(os.environ) | {"PYTHONPROFILEIMPORTTIME": "1"}
    argv = [sys.executable, "-P", "-m", module, *(["serve"] if module == "coordinator.cli" else [])]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environ) as starting:
        assert starting.stderr is not None
        try:
            assert any("pydantic" in line for line in starting.stderr), "it began to import"
            starting.send_signal(number)
            said = starting.stderr.read()
            assert starting.wait(timeout=30) == 0
        finally:
            starting.kill()
    assert f"{number.name} while starting: leaving" in said


def test_a_coordinator_says_where_it_is_and_that_it_drains(smollm2_dir: Path) -> None:
    argv = ["--model", str(smollm2_dir), "--port", "0", "--control", "tcp://127.0.0.1:*"]
    command = [sys.executable, "-P", "-m", "coordinator", *argv]
    environ = child_environment(os.environ)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as coordinator:
        assert coordinator.stderr is not None
        try:
            where = next(line for line in coordinator.stderr if "serves" in line)
            url, control, tokens = re.findall(r"(?:http|tcp)://127\.0\.0\.1:\d+", where)
            assert url.startswith("http") and len({url, control, tokens}) == 3
            assert httpx.get(url + "/health", trust_env=False, timeout=20).status_code == 503
            coordinator.send_signal(signal.SIGTERM)
            assert "draining; requests under way: 0" in coordinator.stderr.read()
            assert coordinator.wait(timeout=30) == 0
        finally:
            coordinator.kill()
