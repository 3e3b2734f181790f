"""The end of a process of this machine is heard of at once, and once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.messages import Register, Sender
from common.request import Incarnation, WorkerId
from coordinator.process_watch import Life, ProcessWatch
from tests.coordinator.cluster_bench import card

ME = Sender("d0", Incarnation(3))
SOON_S = 2.0


def of(process: subprocess.Popen[bytes], host: str | None = None) -> Register:
    return replace(card("d0"), pid=process.pid, host=host or socket.gethostname())


async def heard_of(
    process: subprocess.Popen[bytes], *, host: str | None = None, closes: bool = False
) -> list[Life]:
    heard: list[Life] = []
    ended = asyncio.Event()

    def died(worker: WorkerId, incarnation: Incarnation) -> None:
        heard.append((worker, incarnation))
        ended.set()

    watch = ProcessWatch(died)
    try:
        for _ in range(2):
            watch.watch(of(process, host), ME)
        await asyncio.sleep(0.1)
        assert heard == []
        process.kill()
        if closes:
            await asyncio.sleep(0.01)  # it is known, and not said yet
            watch.close()
        elif host is None:
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


def test_a_process_of_another_machine_is_none_of_ours(process: subprocess.Popen[bytes]) -> None:
    assert asyncio.run(heard_of(process, host="elsewhere")) == []


def test_after_closing_nothing_is_said(process: subprocess.Popen[bytes]) -> None:
    assert asyncio.run(heard_of(process, closes=True)) == []
