"""Two prefill and two decode workers: a crowd, clients that leave, workers and at last the launcher killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.listener import until
from tests.e2e.service import HEARTBEAT_S, Service, completion, serving, streamed
from tests.processes import alive

DRAIN_S = 2.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("pools") / "log"
    flags = ["--prefill", "2", "--decode", "2", "--shutdown-timeout", f"{DRAIN_S:g}"]
    with serving(log, *flags, "--kv-cache-memory", "128MiB") as service:
        yield service


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    fields: dict[str, Any]


def mixed(text_ids: list[int], count: int) -> list[Asked]:
    """Prompts of 1 to 600 tokens, answers of 2 to 10, every third one seeded at temperature 1."""
    lengths = [1, 15, 16, 17, 40, 64, 130, 257, 5, 600, 31, 33, 90, 8, 200, 48]
    asked = []
    for index in range(count):
        start = 17 * index
        fields: dict[str, Any] = {"max_tokens": 2 + index % 9, "ignore_eos": True}
        if index % 3 == 2:
            fields |= {"temperature": 1, "seed": index}
        asked.append(Asked(text_ids[start : start + lengths[index % len(lengths)]], fields))
    return asked


def test_sixty_four_streams_at_once_equal_their_solo_answers(service: Service, text_ids: list[int]) -> None:
    """Sixteen requests, each four times: the copies meet prefixes that are cached, or being computed."""
    asked = mixed(text_ids, 16)
    alone = [service.complete(one.prompt, **one.fields)["text"] for one in asked]
    with ThreadPoolExecutor(64) as threads:
        texts = list(threads.map(lambda one: streamed(service.url, one.prompt, **one.fields), asked * 4))
    assert texts == alone * 4
    service.until_idle()
    for row in service.workers():
        assert row["blocks_free"] + row["blocks_cached"] == row["blocks_total"]
        assert row["blocks_held"] == 0
    moved = [service.counted("kv_transfer_bytes_total", worker=f"decode-{i}") for i in (0, 1)]
    assert min(moved) > 0, "both decode workers had work"


# ---------------------------------------------------------------- clients that leave


@dataclass(frozen=True, slots=True)
class Leaver:
    """Leaves `after_s` after it heard what it waits for: nothing, its first token, or its tenth."""

    start_s: float
    stream: bool
    tokens: int
    after_s: float
    prompt: list[int]


async def leave(port: int, who: Leaver) -> float:
    """A raw socket that is closed without a word; when it was."""
    await asyncio.sleep(who.start_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # Long enough that nobody is answered before it leaves.
    body = json.dumps(completion(who.prompt, max_tokens=4000, ignore_eos=True, stream=who.stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    heard = 0
    while heard < who.tokens:
        line = await asyncio.wait_for(reader.readline(), 100)
        assert line, "the service hung up"
        heard += line.startswith(b"data: ")
    await asyncio.sleep(who.after_s)
    if who.after_s < 0.2:
        writer.transport.abort()  # a reset
    else:
        writer.close()
    return time.monotonic()


def leavers(text_ids: list[int]) -> list[Leaver]:
    """Two hundred within six seconds: some go at once, some in the queue, in prefill, at a token, mid-answer."""
    draw = random.Random(5)
    found = []
    for index in range(200):
        start = draw.randrange(1000)
        prompt = text_ids[start : start + draw.choice((3, 20, 60, 200))]
        waits_for = (0, 0, 0, 1, 10)[index % 5]
        after_s = draw.choice((0.0, 0.01, 0.05, 0.3, 1.0))
        stream = waits_for > 0 or index % 2 == 0
        found.append(Leaver(draw.uniform(0, 6), stream, waits_for, after_s, prompt))
    return found


def test_two_hundred_clients_that_leave(service: Service, text_ids: list[int]) -> None:
    prompt = text_ids[500:530]
    # Ends long before the last client leaves: it is not to be what keeps the gauges up.
    witness_fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    alone = service.complete(prompt, **witness_fields)["text"]
    aborted_before = {phase: service.metric("requests_aborted_total", phase=phase) for phase in PHASES}
    port = int(service.url.rsplit(":", 1)[1])

    async def all_leave() -> float:
        return max(await asyncio.gather(*(leave(port, who) for who in leavers(text_ids))))

    with ThreadPoolExecutor(1) as threads:
        witness = threads.submit(streamed, service.url, prompt, **witness_fields)
        last_left = asyncio.run(all_leave())
        assert witness.result() == alone
    step_s = max(row["step_ms"] for row in service.workers()) / 1e3
    service.until_idle(limit_s=30)
    back_s = time.monotonic() - last_left
    counted = {phase: service.metric("requests_aborted_total", phase=phase) for phase in PHASES}
    left = {phase: counted[phase] - aborted_before[phase] for phase in PHASES}
    print(f"all is back {back_s:.2f} s after the last one left, a step takes {step_s:.2f} s; left in {left}")
    # A step that is out, the word of it, and the heartbeat that says so; a machine that others use too is slow.
    assert back_s < 3 * (step_s + 0.3 + HEARTBEAT_S)
    running = ("kv_ready", "decode_ready", "decoding", "preempted")
    in_order = [left["waiting"] + left["queued"], left["prefilling"], sum(left[phase] for phase in running)]
    assert all(in_order), left
    # Who hung up before its request was read was never taken in.
    assert 150 <= sum(in_order) <= 200
    assert service.complete(prompt, **witness_fields)["text"] == alone


PHASES = ("waiting", "queued", "prefilling", "kv_ready", "decode_ready", "decoding", "preempted")


# ---------------------------------------------------------------- workers that die


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_BR_089_a_killed_worker_is_replaced_and_its_streams_go_on(
    role: str, service: Service, text_ids: list[int]
) -> None:
    """Five streams, and one that a stop string ends; their text is as if nothing had happened."""
    prompts = [text_ids[40 * i : 40 * i + 60] for i in range(5)]
    fields: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    alone = [service.complete(prompt, **fields)["text"] for prompt in prompts]
    stop = alone[0][-4:]
    alone.append(alone[0][: alone[0].index(stop)])
    victim = next(row for row in service.workers() if row["role"] == role)
    heard = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        running = [
            threads.submit(streamed, service.url, prompt, lambda _: heard.set(), **fields)
            for prompt in prompts
        ]
        running.append(threads.submit(streamed, service.url, prompts[0], stop=[stop], **fields))
        assert heard.wait(60)
        os.kill(victim["pid"], signal.SIGKILL)
        assert [one.result() for one in running] == alone
    until(lambda: _is_back(service, victim["id"], victim["pid"]), f"{victim['id']} did not come back")
    service.until_idle()
    assert [service.complete(prompt, **fields)["text"] for prompt in prompts[:2]] == alone[:2]


def test_a_frozen_worker_is_passed_over_and_taken_back(service: Service, text_ids: list[int]) -> None:
    """It says nothing for longer than the limit, its streams go on elsewhere; then it wakes, and what it says of
    the old attempts changes nothing."""
    prompts = [text_ids[30 * i : 30 * i + 50] for i in range(4)]
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    alone = [service.complete(prompt, **fields)["text"] for prompt in prompts]
    frozen = service.worker("decode-1")["pid"]
    heard = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        running = [
            threads.submit(streamed, service.url, prompt, lambda _: heard.set(), **fields)
            for prompt in prompts
        ]
        assert heard.wait(60)
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert [one.result() for one in running] == alone
            until(lambda: service.worker("decode-1")["state"] == "lost", "decode-1 is not seen as lost")
        finally:
            os.kill(frozen, signal.SIGCONT)
    until(lambda: service.worker("decode-1")["state"] == "ready", "decode-1 is not taken back")
    assert service.worker("decode-1")["pid"] == frozen, "it needed no new life"
    service.until_idle()
    assert [service.complete(prompt, **fields)["text"] for prompt in prompts[:2]] == alone[:2]


PACE_S = 0.5
AT_ONCE = 48


@pytest.mark.timeout(400)
def test_all_workers_are_restarted_in_turn_under_load(service: Service, text_ids: list[int]) -> None:
    """Every worker is drained and comes again, by a POST or by SIGTERM, while two requests of 64 tokens come every
    second, whatever has become of those before. None fails, and every text is exact: of those, too, that a worker
    could not finish in time. A machine that others use gets no more of them than `AT_ONCE`."""
    prompts = [text_ids[25 * i : 25 * i + 45] for i in range(4)]
    fields: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    over = threading.Event()
    asked: list[Future[str]] = []
    restarts = service.log().count("left (exit code 0), starting it again")

    def come(threads: ThreadPoolExecutor) -> None:
        began = time.monotonic()
        for number in itertools.count():
            if over.wait(max(0.0, began + PACE_S * number - time.monotonic())):
                break
            if sum(not one.done() for one in asked) < AT_ONCE:
                prompt = prompts[len(asked) % len(prompts)]
                asked.append(threads.submit(streamed, service.url, prompt, **fields))
        print(f"{len(asked)} requests, one every {(time.monotonic() - began) / len(asked):.2f} s")

    with ThreadPoolExecutor(AT_ONCE + 1) as threads:
        alone = list(threads.map(lambda prompt: streamed(service.url, prompt, **fields), prompts))
        coming = threads.submit(come, threads)
        try:
            for number, worker in enumerate(("decode-0", "prefill-0", "decode-1", "prefill-1")):
                pid = service.worker(worker)["pid"]
                if number in (0, 3):
                    answer = service.post(f"/admin/workers/{worker}/drain", {"deadline_s": DRAIN_S})
                    assert (answer.status_code, answer.json()["state"]) == (202, "draining")
                else:
                    os.kill(pid, signal.SIGTERM)
                until(lambda w=worker, p=pid: _is_back(service, w, p), f"{worker} did not come back", 90)  # type: ignore[misc]
        finally:
            over.set()
            coming.result()
        assert [one.result() for one in asked] == [alone[n % len(alone)] for n in range(len(asked))]
    assert service.log().count("left (exit code 0), starting it again") == restarts + 4
    service.until_idle()


def _is_back(service: Service, worker: str, pid: int) -> bool:
    row = service.worker(worker)
    return bool(row["pid"] != pid and row["state"] == "ready")


def test_a_killed_coordinator_comes_back_to_its_workers(service: Service, text_ids: list[int]) -> None:
    """Its streams are lost, with their connections; the workers live on, and give up what nobody wants."""
    workers = {row["id"]: row["pid"] for row in service.workers()}
    prompt = text_ids[200:240]
    fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    alone = service.complete(prompt, **fields)["text"]
    (coordinator,) = [pid for pid in service.descendants() if pid not in workers.values()]
    heard = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        broken = threads.submit(
            streamed, service.url, text_ids[:30], lambda _: heard.set(), max_tokens=4000, ignore_eos=True
        )
        assert heard.wait(60)
        os.kill(coordinator, signal.SIGKILL)
        assert isinstance(broken.exception(60), httpx.HTTPError)
    until(lambda: _is_healthy(service), "the service does not come back")
    assert {row["id"]: row["pid"] for row in service.workers()} == workers
    service.until_idle()
    assert service.complete(prompt, **fields)["text"] == alone


def _is_healthy(service: Service) -> bool:
    try:
        rows = service.workers()
    except httpx.HTTPError:
        return False
    return len(rows) == 4 and all(row["state"] == "ready" for row in rows)


def test_a_killed_launcher_takes_its_children_with_it(service: Service) -> None:
    """Last in this file: the service is gone after it."""
    children = service.descendants()
    assert len(children) >= 5
    os.kill(service.launcher.pid, signal.SIGKILL)
    service.launcher.wait()
    deadline = time.monotonic() + 2.0
    while left := [pid for pid in children if alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)
