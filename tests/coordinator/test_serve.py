"""`kvferry serve` whole: real processes, the real model, from a person's side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.paths import child_environment
from tests.processes import alive

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

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline_s, self.said
            time.sleep(0.05)

    def until_ready(self) -> str:
        """The URL, as printed."""
        self.until(lambda: "try it:" in self.said)
        url = next(line for line in self._out.read_text().splitlines() if line.startswith("URL"))
        return url.split()[1].removesuffix("/v1")


def workers(url: str) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{url}/admin/workers").json()
    return {row["id"]: row for row in rows if row["state"] == "ready"}


def capital_of_france(url: str) -> str:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


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


def test_serve_answer_lose_a_worker_answer_again_and_stop(
    start: Callable[..., Service], smollm2_dir: Path
) -> None:
    service = start("--port", "0")
    url = service.until_ready()
    assert httpx.get(f"{url}/health").status_code == 200
    assert "Paris" in capital_of_france(url)

    before = workers(url)
    assert {row["role"] for row in before.values()} == {"prefill", "decode"}
    os.kill(before["decode-0"]["pid"], signal.SIGKILL)
    service.until(
        lambda: "decode-0" in (now := workers(url)) and now["decode-0"]["pid"] != before["decode-0"]["pid"]
    )
    assert workers(url)["prefill-0"]["pid"] == before["prefill-0"]["pid"]
    assert "Paris" in capital_of_france(url)

    pids = [row["pid"] for row in workers(url).values()]
    service.process.terminate()
    assert service.process.wait(timeout=20) == 0, service.said
    assert not any(alive(pid) for pid in pids)


def test_kill_9_of_serve_takes_the_real_workers(start: Callable[..., Service], smollm2_dir: Path) -> None:
    service = start("--port", "0", "--prefill", "0")
    url = service.until_ready()
    pids = [row["pid"] for row in workers(url).values()]
    assert len(pids) == 1
    service.process.kill()
    service.process.wait()
    deadline_s = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


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
    assert "mamba" in service.said.splitlines()[-1].lower()
