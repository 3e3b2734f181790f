"""What people write, what they are answered and their keys are in no log, at the level that says most."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import MODEL, Service, completion, serving

MARK = "Quetzalcoatlus"
KEY = "sk-hummingbird-4711"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ["--log-level", "debug", "--api-key", KEY, "--kv-cache-memory", "128MiB"]
    with serving(tmp_path_factory.mktemp("logs") / "log", *flags) as service:
        yield service


def whole(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    return service.post(path, {"model": MODEL, "temperature": 0, **body})


def left_after_a_token(service: Service, victim: int | None = None) -> None:
    """Streams, kills `victim` when the first token is there, and hangs up."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = completion(f"{MARK} is", stream=True, max_tokens=400, ignore_eos=True)
    with (
        httpx.Client(trust_env=False, timeout=60, headers=headers) as client,
        client.stream("POST", service.url + "/v1/completions", json=body) as answer,
    ):
        next(line for line in answer.iter_lines() if line.startswith("data: "))
        if victim is not None:
            os.kill(victim, signal.SIGKILL)


def garbage(service: Service) -> None:
    """At every worker's socket for peers."""
    for row in service.workers():
        host, _, port = row["address"].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(f"{MARK} {KEY}\r\n\r\n".encode() * 20)


def log_with(service: Service, line: str) -> str:
    """The log, once it shows what we know has happened: an idle service may be faster than its own words."""
    deadline = time.monotonic() + 30
    while line not in (log := service.log()):
        assert time.monotonic() < deadline, f"the log shows nothing of {line!r}:\n{log}"
        time.sleep(0.05)
    return log


def test_no_prompt_no_answer_and_no_key_is_logged(talkative: Service) -> None:
    service = talkative
    answers = [
        whole(service, "/v1/completions", {"prompt": f"{MARK} was a", "max_tokens": 24, "user": MARK}),
        whole(service, "/v1/completions", {"prompt": MARK, "max_tokens": 8, "stop": [MARK], "logprobs": 2}),
        whole(
            service,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": f"{MARK}?"}], "max_tokens": 24},
        ),
    ]
    texts = [json.loads(answer.text)["choices"][0] for answer in answers]
    said = [one["text"] if "text" in one else one["message"]["content"] for one in texts]
    refused = whole(service, "/v1/completions", {"prompt": MARK, "max_tokens": MARK})
    assert [answer.status_code for answer in (*answers, refused)] == [200, 200, 200, 400]
    for path in (f"/v1/models/{MARK}", f"/admin/requests/{MARK}"):
        service._client.get(service.url + path)
    httpx.get(service.url + "/v1/models", headers={"authorization": f"Bearer {KEY}{MARK}"}, trust_env=False)
    left_after_a_token(service)
    garbage(service)
    left_after_a_token(service, victim=service.worker("decode-0")["pid"])
    service.until_idle(60)
    log = log_with(service, "decode worker decode-0 died")
    pieces = [text[at : at + 16] for text in said for at in range(0, max(1, len(text) - 16), 8)]
    assert len(pieces) > 10
    found = [secret for secret in (MARK, KEY, *pieces) if len(secret) >= 8 and secret in log]
    assert found == []
