"""Workers that change their role under running streams: one that the launcher keeps, and one that nobody does.

One service of one prefill and two decode workers, and a third decode worker beside it, for all tests, in order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.messages import Role
from common.paths import child_environment
from tests.e2e.listener import until
from tests.e2e.service import ROOT, Service, serving, streamed

CACHE = ["--kv-cache-memory", "128MiB"]
FIELDS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True}
STREAMS = 6
NEW, NEW_SPARE = "prefill-from-decode-1", "prefill-from-spare"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("roles") / "log", "--decode", "2", *CACHE) as service:
        yield service


@pytest.fixture(scope="module")
def spare(
    service: Service, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """A decode worker called "spare", started by hand."""
    found = re.search(r"workers come to (tcp://\S+),", service.log())
    assert found is not None
    flags = ["--coordinator", found[1], "--model", str(smollm2_dir), "--worker-id", "spare", "--threads", "1"]
    log = tmp_path_factory.mktemp("spare") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "decode_node", *flags, *CACHE],
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: states(service).get("spare") == ("decode", "ready"), "the spare one does not come")
        yield process
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
        assert not re.search("Traceback|Error", log.read_text()), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[60 * i : 60 * i + 50] for i in range(3)]


@pytest.fixture(scope="module")
def alone(service: Service, prompts: list[list[int]]) -> list[str]:
    return [service.complete(prompt, **FIELDS)["text"] for prompt in prompts]


@contextmanager
def streams(service: Service, prompts: list[list[int]], alone: list[str]) -> Iterator[None]:
    """Six of them: all have begun when the body of `with` runs, and all are exact in the end."""
    begun = [threading.Event() for _ in range(STREAMS)]

    def ask(number: int) -> str:
        return streamed(service.url, prompts[number % 3], lambda _: begun[number].set(), **FIELDS)

    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(ask, number) for number in range(STREAMS)]
        for one in begun:
            assert one.wait(60)
        yield
        assert [one.result() for one in running] == alone * (STREAMS // 3)


def change(service: Service, worker: str, role: Role, deadline_s: float) -> httpx.Response:
    return service.post(f"/admin/workers/{worker}/role", {"role": role, "deadline_s": deadline_s})


def states(service: Service) -> dict[str, tuple[str, str]]:
    return {row["id"]: (row["role"], row["state"]) for row in service.workers()}


def prefilled_by(service: Service, text_ids: list[int]) -> set[str]:
    """Who computes prompts, of eight long ones at once."""
    with ThreadPoolExecutor(8) as threads:
        prompts = [text_ids[97 * i : 97 * i + 300] for i in range(8)]
        ids = list(threads.map(lambda prompt: service.complete(prompt, max_tokens=2)["id"], prompts))
    return {service.get(f"/admin/requests/{one}")["prefill_worker"] for one in ids}


def test_decode_workers_become_prefill_workers_amid_streams(
    service: Service,
    spare: subprocess.Popen[bytes],
    prompts: list[list[int]],
    alone: list[str],
    text_ids: list[int],
) -> None:
    """With time, and without: what does not end there goes on elsewhere. The last decode worker is not taken."""
    before = {row["id"]: row["pid"] for row in service.workers()}
    with streams(service, prompts, alone):
        for worker, deadline_s in (("decode-1", 0.2), ("spare", 30.0)):
            answer = change(service, worker, "prefill", deadline_s)
            assert (answer.status_code, answer.json()["state"]) == (202, "draining")
            assert answer.json()["becomes"] == "prefill"
        refused = change(service, "decode-0", "prefill", 1.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_decode_worker")
        took_s = until(
            lambda: {states(service).get(new) for new in (NEW, NEW_SPARE)} == {("prefill", "ready")},
            "they do not come back",
        )
    print(f"two workers changed their roles in {took_s:.1f} s, under {STREAMS} streams")
    assert states(service).keys() == {"prefill-0", "decode-0", NEW, NEW_SPARE}
    assert service.worker(NEW)["pid"] != before["decode-1"]
    assert service.worker(NEW_SPARE)["pid"] == before["spare"] == spare.pid, "it is the same process"
    assert service.metric("role_changes_total", role="prefill") == 2
    assert service.metric("workers_lost_total") == 0
    assert f"decode-1 │ left its role, starting it as {NEW}" in service.log()
    assert "starting it again" not in service.log()
    assert {NEW, NEW_SPARE} <= prefilled_by(service, text_ids)
    assert change(service, NEW, "prefill", 1.0).status_code == 200, "it is one already"
    shown = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "status", "--url", service.url],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    assert re.search(rf"{NEW} +prefill", shown) and "decode-1 " not in shown.replace(NEW, "")
    service.until_idle()


def test_killed_in_its_new_role_it_comes_back_in_that(
    service: Service, prompts: list[list[int]], alone: list[str]
) -> None:
    pid = service.worker(NEW)["pid"]
    with streams(service, prompts, alone):
        os.kill(pid, signal.SIGKILL)
        until(lambda: service.worker(NEW)["pid"] != pid, "it does not come back")
    until(lambda: states(service)[NEW] == ("prefill", "ready"), "it is not ready")
    assert "decode-1" not in states(service)


def test_they_go_back_amid_streams(
    service: Service, spare: subprocess.Popen[bytes], prompts: list[list[int]], alone: list[str]
) -> None:
    with streams(service, prompts, alone):
        for worker in (NEW, NEW_SPARE):
            assert change(service, worker, "decode", 10.0).status_code == 202
        until(
            lambda: {states(service).get(old) for old in ("decode-1", "spare")} == {("decode", "ready")},
            "they do not come back",
        )
    assert states(service).keys() == {"prefill-0", "decode-0", "decode-1", "spare"}
    assert service.worker("spare")["pid"] == spare.pid
    with streams(service, prompts, alone):
        until(
            lambda: all(service.worker(one)["running"] for one in ("decode-0", "decode-1", "spare")),
            "one of them has no part in it",
        )
    service.until_idle()


def test_killed_amid_the_change_it_comes_back_as_it_was(
    service: Service, prompts: list[list[int]], alone: list[str]
) -> None:
    pid = service.worker("decode-1")["pid"]
    with streams(service, prompts, alone):
        assert change(service, "decode-1", "prefill", 60.0).status_code == 202
        until(lambda: service.worker("decode-1")["state"] == "draining", "it does not drain")
        os.kill(pid, signal.SIGKILL)
    until(lambda: states(service).get("decode-1") == ("decode", "ready"), "it does not come back")
    assert service.worker("decode-1")["pid"] != pid and NEW not in states(service)
    service.until_idle()
