"""Starts one server, waits until it serves, and ends it with all of its processes.

Each gets a session of its own, so that what it starts ends with it. What a server says goes to a file.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

READY_WITHIN_S = 600.0  # a first start of the peer compiles its model
LEAVES_WITHIN_S = 40.0
LOOKS_EVERY_S = 0.5
LAST_WORDS = 600  # characters of what it said that a fault shows


class ServerFault(Exception):
    """It did not start, or died; the message says where its last words are."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that can be asked: where, and what it calls the model. `promised`: what a request says more (JSON), for
    which the targets are to be kept."""

    url: str
    model: str
    promised: str = ""


def kvferry_command(model: Path, port: int, config: Path, flags: Sequence[str]) -> list[str]:
    """Default flags but for those given. One that is given last wins."""
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--model", str(model), "--port", str(port)]
    return [*command, "--config", str(config), *flags]


def vllm_command(peers: Path, venv: Path, model: Path, port: int, flags: Sequence[str]) -> list[str]:
    """Both cores for its engine: that is its best on two (`peers/serve_vllm_cpu.sh`)."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    return ["bash", str(peers / "serve_vllm_cpu.sh"), str(venv), str(model), str(port), cores, *flags]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], target: Target, log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """The server while the block runs. Raises ServerFault."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})}, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_ready(process, target.url, log)
            yield target
            if process.poll() is not None:
                raise ServerFault(f"it died under load with {process.returncode}: {_last_words(log)}")
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerFault(f"it ended with {process.returncode} while starting: {_last_words(log)}")
        if is_healthy(url):
            return
        time.sleep(LOOKS_EVERY_S)
    raise ServerFault(f"it was not ready within {READY_WITHIN_S:g} s: {_last_words(log)}")


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _last_words(log: Path) -> str:
    said = log.read_text(errors="replace")[-LAST_WORDS:].strip() if log.exists() else ""
    return f"{said}\n(all of it: {log})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to its first process, then SIGKILL to what is left of its group: nothing computes beside the next."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVES_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
