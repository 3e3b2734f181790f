"""`kvferry serve` that cannot start: real processes, from a person's side. What it does once it runs, and every way
out of that, is in tests/e2e."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.paths import child_environment

SMALL_CACHE = ("--kv-cache-memory", "64MiB", "--shutdown-timeout", "5")


class Service:
    """`kvferry serve` as a process; what it prints goes to files."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-P", "-m", "coordinator.cli", "serve", *SMALL_CACHE, *flags]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=child_environment(os.environ)
            )

    @property
    def said(self) -> str:
        return self._out.read_text() + self._err.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def one(*flags: str) -> Service:
        started.append(Service(tmp_path, *flags))
        return started[-1]

    yield one
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


def test_a_taken_port_ends_it_with_3_and_says_so(start: Callable[..., Service], smollm2_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = start("--port", str(port))
        assert service.process.wait(timeout=30) == 3, service.said
    assert f"{port}" in service.said.splitlines()[-1]
    assert "try it:" not in service.said


def test_a_model_that_is_not_honoured_ends_it_with_4_and_its_name(
    start: Callable[..., Service], smollm2_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(smollm2_dir, model, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    service = start("--port", "0", "--model", str(model))
    assert service.process.wait(timeout=60) == 4, service.said
    assert "mamba" in service.said.lower()
