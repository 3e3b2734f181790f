"""More than a small service can take: who is turned away is told when to come back, who is served is served right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.listener import Heard, listen, until
from tests.e2e.service import Service, completion, serving
from tests.processes import alive

BLOCKS = 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ["--max-queue", "4", "--max-num-seqs", "2", "--num-kv-blocks", str(BLOCKS)]
    with serving(tmp_path_factory.mktemp("small") / "log", *flags) as service:
        yield service


def test_a_burst_is_served_or_told_when_to_come_back(small: Service, text_ids: list[int]) -> None:
    prompts = [text_ids[9 * i : 9 * i + 40] for i in range(32)]

    def ask(prompt: list[int]) -> httpx.Response:
        body = completion(prompt, max_tokens=12, ignore_eos=True)
        with httpx.Client(verify=False, trust_env=False, timeout=120) as client:
            return client.post(small.url + "/v1/completions", json=body)

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, prompts))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}, statuses
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] and answer.json()["error"]["message"]
    small.until_idle()
    assert small.metric("requests_rejected_total") == statuses.count(429)
    served = [
        (p, a.json()["choices"][0]["text"])
        for p, a in zip(prompts, answers, strict=True)
        if a.status_code == 200
    ]
    for prompt, text in served[:6]:
        assert small.complete(prompt, max_tokens=12, ignore_eos=True)["text"] == text


def test_what_the_pools_can_never_hold_is_refused_with_the_numbers(small: Service) -> None:
    """40 blocks of 16 are 640 tokens: less than the model's context, and what the service says it has."""
    (model,) = small.get("/v1/models")["data"]
    room = model["max_model_len"]
    assert 600 <= room <= BLOCKS * 16
    too_long = small.post("/v1/completions", completion([7] * room, max_tokens=1))
    assert too_long.status_code == 400 and str(room) in too_long.json()["error"]["message"]
    too_much = small.post("/v1/completions", completion([7] * 600, max_tokens=room - 599))
    assert too_much.status_code == 400 and too_much.json()["error"]["param"] == "max_tokens"
    assert small.complete([7] * (room - 2), max_tokens=2, ignore_eos=True)["usage"]["total_tokens"] == room
    small.until_idle()


def test_BR_103_more_choices_than_run_at_once_take_turns(small: Service, text_ids: list[int]) -> None:
    """Two run, the others wait in the queue; a group that the queue can never hold is told so."""
    body = completion(text_ids[:20], max_tokens=4, temperature=1, seed=3, ignore_eos=True)
    answer = small.post("/v1/completions", body | {"n": 4})
    assert answer.status_code == 200, answer.text
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(texts) == 4 and len(set(texts)) > 1
    assert answer.json()["usage"]["completion_tokens"] == 16
    assert small.post("/v1/completions", body | {"n": 1}).json()["choices"][0]["text"] == texts[0]
    many = small.post("/v1/completions", body | {"n": 100})
    assert many.status_code == 400 and many.json()["error"]["message"], many.text
    small.until_idle()


def test_BR_142_ctrl_c_twice_when_busy(small: Service, text_ids: list[int]) -> None:
    """Whoever runs or waits hears why, and all is gone in five seconds; also where the coordinator gets to run only
    once it has both signals. Last in this file: the service is gone."""
    children = small.descendants()
    coordinator = small.coordinator()
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(6) as threads:

        def ask(number: int, stream: bool) -> Future[Heard]:
            prompt = text_ids[9 * number : 9 * number + 20]
            return threads.submit(
                listen, small.url, prompt, stream, begun.release, max_tokens=280, ignore_eos=True
            )

        running = [ask(number, True) for number in range(2)]
        for _ in running:
            assert begun.acquire(timeout=60)
        waiting = [ask(number, number % 2 == 0) for number in range(2, 6)]
        until(lambda: small.metric("num_requests_waiting") == 4, "they do not wait")
        os.kill(coordinator, signal.SIGSTOP)
        small.launcher.send_signal(signal.SIGINT)
        began = time.monotonic()
        until(lambda: "once more stops at once" in small.log(), "it does not hear")
        small.launcher.send_signal(signal.SIGINT)
        until(lambda: "stopping at once" in small.log(), "it does not hear again")
        time.sleep(0.1)
        os.kill(coordinator, signal.SIGCONT)
        assert small.launcher.wait(30) == 1
        took_s = time.monotonic() - began
        ends = [one.result() for one in (*running, *waiting)]
    print(f"gone {took_s:.2f} s after the first Ctrl-C")
    assert took_s < 5.0
    assert [(end.status, end.error.get("code")) for end in ends] == [
        *[(200, "shutting_down")] * len(running),
        *[(503, "shutting_down")] * len(waiting),
    ]
    assert [pid for pid in children if alive(pid)] == []
