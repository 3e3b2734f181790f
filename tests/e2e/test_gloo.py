"""A service whose KV travels in process groups: the same bits, and requests that outlive a worker that dies or stops.

Over gloo, whose code nccl shares but for the group itself. One service for all, in order; in the end it lacks a worker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.listener import listen, until
from tests.e2e.service import Service, serving

STREAMS = 6
FIELDS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ["--transfer", "gloo", "--decode", "2", "--worker-timeout", "2", "--kv-cache-memory", "128MiB"]
    with serving(tmp_path_factory.mktemp("gloo") / "log", *flags) as service:
        yield service


def ask(service: Service, text_ids: list[int]) -> list[dict[str, Any]]:
    seeded = {"temperature": 1, "top_p": 0.9, "seed": 5}
    asked = [(16, {}), (33, seeded), (129, {}), (300, seeded)]
    answers = [
        service.complete(text_ids[17 * index : 17 * index + length], max_tokens=4, logprobs=5, **fields)
        for index, (length, fields) in enumerate(asked)
    ]
    return [{key: answer[key] for key in ("text", "logprobs", "finish_reason")} for answer in answers]


def test_every_answer_is_that_of_the_other_channels_to_the_last_bit(
    shared: Service, service: Service, text_ids: list[int]
) -> None:
    assert ask(service, text_ids) == ask(shared, text_ids)
    assert service.counted("kv_transfer_bytes_total", channel="gloo")
    assert service.metric("kv_transfer_bytes_total") == service.metric(
        "kv_transfer_bytes_total", channel="gloo"
    )


@pytest.mark.parametrize("number, worker", [(signal.SIGSTOP, "decode-1"), (signal.SIGKILL, "prefill-0")])
def test_a_worker_that_stops_or_dies_amid_transfers_costs_no_request(
    number: signal.Signals, worker: str, service: Service, text_ids: list[int]
) -> None:
    prompts = [text_ids[90 * i : 90 * i + 300] for i in range(STREAMS)]
    alone = [service.complete(prompt, **FIELDS)["text"] for prompt in prompts[:2]]
    pid = service.worker(worker)["pid"]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [
            threads.submit(listen, service.url, prompt, True, begun.release, **FIELDS) for prompt in prompts
        ]
        assert begun.acquire(timeout=60)
        os.kill(pid, number)
        try:
            heard = [stream.result() for stream in streams]
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    assert [one.error for one in heard] == [{}] * STREAMS and all(one.over for one in heard)
    assert [one.text for one in heard[:2]] == alone
    if number == signal.SIGSTOP:
        until(lambda: {row["state"] for row in service.workers()} == {"ready"}, "it does not come back")
        service.until_idle()
        assert [service.complete(prompt, **FIELDS)["text"] for prompt in prompts[:2]] == alone
