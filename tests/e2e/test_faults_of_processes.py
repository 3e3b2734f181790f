"""Faults of groups C and J over real processes: who dies, is stopped or told to leave, and what its clients get.

One service of one prefill and two decode workers for all of them, in order; it is gone after the last.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.listener import Heard, listen, until
from tests.e2e.service import Service, serving
from tests.processes import alive

DRAIN_S = 1.5
FIELDS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


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
            assert begun.acquire(timeout=60)
        yield streams


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


def test_BR_140_a_coordinator_that_is_told_to_leave_ends_what_is_left_with_an_error(
    service: Service, prompts: list[list[int]], alone: list[str]
) -> None:
    """Its streams have its limit, then an error that says why. It is started again, and its workers come to it."""
    until(lambda: all_ready(service), "somebody is missing")
    workers = {row["pid"] for row in service.workers()}
    (coordinator,) = set(service.descendants()) - workers
    with twenty_streams(service, prompts, **ENDLESS) as streams:
        os.kill(coordinator, signal.SIGTERM)
        began = time.monotonic()
        ends = [one.result() for one in streams]
        assert time.monotonic() - began > DRAIN_S
    assert {(end.status, end.error.get("code"), end.over) for end in ends} == {(200, "shutting_down", False)}
    for end, text in zip(ends, alone * 5, strict=True):
        assert end.text.startswith(text) or text.startswith(end.text), "not what it says undisturbed"
    until(lambda: not alive(coordinator), "the old one stays")  # it, too, says that all are ready
    until(lambda: all_ready(service), "the service does not come back")
    assert service.complete(prompts[0], **FIELDS)["text"] == alone[0]
    print(f"a new request was answered {time.monotonic() - began - DRAIN_S:.1f} s after the old one's limit")
    assert "coordinator │ left (exit code 0)" in service.log()
    assert {row["pid"] for row in service.workers()} == workers
    service.until_idle()


def test_BR_142_ctrl_c_when_busy(service: Service, prompts: list[list[int]]) -> None:
    """Who runs and who waits, streamed or not, hears why, and all is gone five seconds after its limit. Twice: in
    `test_overload.py`; idle: every service of these tests ends so."""
    until(lambda: all_ready(service), "somebody is missing")
    children = service.descendants()
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(40) as threads:
        asked = [
            threads.submit(listen, service.url, prompts[i % 4], i % 2 == 0, begun.release, **ENDLESS)
            for i in range(40)
        ]
        for _ in range(8):
            assert begun.acquire(timeout=60)
        until(lambda: service.metric("num_requests_waiting") > 0, "nobody waits")
        service.launcher.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert service.launcher.wait(30) == 0
        took_s = time.monotonic() - began
        ends = [one.result() for one in asked]
    print(f"gone {took_s:.2f} s after Ctrl-C, of which {DRAIN_S} s were given to who runs")
    assert took_s < DRAIN_S + 5.0
    assert {end.error.get("code") for end in ends} == {"shutting_down"}
    assert {end.status for end in ends} == {200, 503}
    assert {end.status for end in ends[1::2]} == {503}, "who had heard nothing yet gets a status that says so"
    assert [pid for pid in children if alive(pid)] == []
