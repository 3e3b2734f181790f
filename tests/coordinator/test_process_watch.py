"""The end of a process of this machine is heard of at once, and once."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.messages import Register, Sender
from common.process_space import process_space
from common.request import Incarnation, WorkerId
from coordinator.process_watch import Life, ProcessWatch
from tests.coordinator.cluster_bench import card

ME = Sender("d0", Incarnation(3))
SOON_S = 2.0
ROOT = Path(__file__).parents[2]


def of(process: subprocess.Popen[bytes], space: str | None = None) -> Register:
    here = process_space() if space is None else space
    return replace(card("d0"), pid=process.pid, host=socket.gethostname(), process_space=here)


async def heard_of(
    process: subprocess.Popen[bytes], *, space: str | None = None, closes: bool = False
) -> list[Life]:
    heard: list[Life] = []
    ended = asyncio.Event()

    def died(worker: WorkerId, incarnation: Incarnation) -> None:
        heard.append((worker, incarnation))
        ended.set()

    watch = ProcessWatch(died)
    try:
        for _ in range(2):
            watch.watch(of(process, space), ME)
        await asyncio.sleep(0.1)
        assert heard == []
        process.kill()
        if closes:
            await asyncio.sleep(0.01)  # it is known, and not said yet
            watch.close()
        elif space is None:
            await asyncio.wait_for(ended.wait(), SOON_S)
        await asyncio.sleep(0.1)
    finally:
        watch.close()
    return heard


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_an_end_is_heard_of_once(process: subprocess.Popen[bytes]) -> None:
    assert asyncio.run(heard_of(process)) == [("d0", 3)]


@pytest.mark.parametrize("space", ["", "another boot or another container"])
def test_a_process_of_another_machine_is_none_of_ours(process: subprocess.Popen[bytes], space: str) -> None:
    """Of the same host name too: containers share it, and one's process 7 is not another's."""
    assert asyncio.run(heard_of(process, space=space)) == []


def test_one_life_of_a_worker_is_watched_and_no_more_than_there_are_descriptors_for(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.process_watch.MAX_WATCHED", 2)

    async def story() -> None:
        heard: list[WorkerId] = []
        watch = ProcessWatch(lambda worker, _: heard.append(worker))
        files = len(os.listdir("/proc/self/fd"))
        for incarnation in (3, 4, 5):
            watch.watch(of(process), Sender("d0", Incarnation(incarnation)))
        assert len(os.listdir("/proc/self/fd")) == files + 1, "the lives before it are over"
        for name in ("d1", "d2"):
            watch.watch(of(process), Sender(name, Incarnation(1)))
        assert len(os.listdir("/proc/self/fd")) == files + 2
        process.kill()
        async with asyncio.timeout(SOON_S):
            while len(heard) < 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        watch.close()
        assert sorted(heard) == ["d0", "d1"]

    asyncio.run(story())


def test_a_container_is_a_space_of_its_own() -> None:
    elsewhere = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c",
         "from common.process_space import process_space; print(process_space())"],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if elsewhere.returncode:
        pytest.skip(f"no process namespaces here: {elsewhere.stderr.strip()}")
    assert process_space() != elsewhere.stdout.strip() != ""


def test_after_closing_nothing_is_said(process: subprocess.Popen[bytes]) -> None:
    assert asyncio.run(heard_of(process, closes=True)) == []
