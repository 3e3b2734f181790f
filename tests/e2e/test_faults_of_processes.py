"""Faults of groups C and J over real processes: who dies, is stopped or told to leave, and what its clients get.

One service of one prefill and two decode workers for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import Service, completion, serving

DRAIN_S = 1.5
FIELDS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ["--decode", "2", "--max-num-seqs", "12", "--shutdown-timeout", str(DRAIN_S)]
    log = tmp_path_factory.mktemp("processes") / "log"
    with serving(log, *flags, "--kv-cache-memory", "256MiB") as service:
        yield service


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[60 * i : 60 * i + 40] for i in range(4)]


@pytest.fixture(scope="module")
def alone(service: Service, prompts: list[list[int]]) -> list[str]:
    return [service.complete(prompt, **FIELDS)["text"] for prompt in prompts]


@dataclass(slots=True)
class Heard:
    """What a client got of one request: the status, text, and the error that ended it."""

    status: int = 0
    text: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    over: bool = False


def listen(url: str, prompt: list[int], stream: bool, begun: Callable[[], object], **fields: Any) -> Heard:
    heard = Heard()
    body = completion(prompt, stream=stream, **fields)
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        heard.status = answer.status_code
        if not stream or answer.status_code != 200:
            heard.error = json.loads(answer.read()).get("error", {})
            return heard
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                heard.over = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                heard.error = event.get("error", heard.error)
                text = "" if "error" in event else event["choices"][0]["text"]
                if text and not heard.text:
                    begun()
                heard.text += text
    return heard


@contextmanager
def twenty_streams(
    service: Service, prompts: list[list[int]], wait_for: int = 20, **fields: Any
) -> Iterator[list[Future[Heard]]]:
    """Twenty clients, of whom `wait_for` have heard a first token when the body of `with` runs."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(20) as threads:
        streams = [
            threads.submit(listen, service.url, prompts[i % 4], True, begun.release, **fields)
            for i in range(20)
        ]
        for _ in range(wait_for):
            assert begun.acquire(timeout=30)
        yield streams


def until(done: Callable[[], object], otherwise: str, limit_s: float = 30.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < limit_s, otherwise
        time.sleep(0.02)
    return time.monotonic() - began


def all_ready(service: Service) -> bool:
    try:
        rows = service.workers()
    except httpx.HTTPError:
        return False
    return len(rows) == 3 and all(row["state"] == "ready" for row in rows)


def sockets_of(pid: int) -> int:
    """Open sockets of a process, by what the system says."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except FileNotFoundError:  # closed between the two looks
            continue
    return found


def maps_a_pool(pid: int) -> bool:
    return "kvferry-pool" in Path(f"/proc/{pid}/maps").read_text()


# ---------------------------------------------------------------- what the dead leave behind


def test_BR_043_a_dead_peers_sockets_and_mapped_pool_are_released_at_once(
    service: Service, prompts: list[list[int]]
) -> None:
    """Not when its next life is spoken to: nobody is asked for anything meanwhile."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda prompt: service.complete(prompt, max_tokens=12), prompts))
    pids = dict(service.children)
    assert maps_a_pool(pids["decode-0"]) and maps_a_pool(pids["decode-1"]), "one of them had nothing to do"
    before = sockets_of(pids["prefill-0"])
    os.kill(pids["decode-1"], signal.SIGKILL)
    # Two connections over TCP, and the one that stands for the mapping.
    until(lambda: sockets_of(pids["prefill-0"]) <= before - 3, "the dead one's sockets stay open", 5.0)
    os.kill(pids["prefill-0"], signal.SIGKILL)
    until(lambda: not maps_a_pool(pids["decode-0"]), "the dead one's pool stays mapped", 2.0)
    until(lambda: all_ready(service), "they do not come back")


# ---------------------------------------------------------------- told to leave


@pytest.mark.parametrize("worker", ["decode-1", "prefill-0"])
def test_BR_140_a_worker_that_is_told_to_leave_costs_its_twenty_streams_nothing(
    worker: str, service: Service, prompts: list[list[int]], alone: list[str]
) -> None:
    """What does not end within --shutdown-timeout goes on elsewhere; the process ends with 0."""
    until(lambda: all_ready(service), "somebody is missing")
    pid = service.worker(worker)["pid"]
    with twenty_streams(service, prompts, 20 if worker == "decode-1" else 1, **FIELDS) as streams:
        os.kill(pid, signal.SIGTERM)
        assert [one.result().text for one in streams] == alone * 5
        assert all(one.result().over for one in streams)
    until(lambda: f"{worker} │ left (exit code 0)" in service.log(), "it did not leave with 0")
