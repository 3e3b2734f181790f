"""Clients that are slow, large or silent, at a whole service: bounded memory, freed blocks, and nobody else hurt.

The service's model is tiny and random, so that a hundred streams cost a second; everything else is as in use.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.service import MODEL, Service, completion, events, serving

KEY = "k3y-that-nobody-may-see"
WRITE_TIMEOUT_S = 2.0
BUFFERED_BYTES = 64 << 10
NUM_BAD = 100
BOUND_BYTES = NUM_BAD * (BUFFERED_BYTES + (320 << 10)) + (24 << 20)
"""Of `coordinator/door/limits.py` for so many streams, and something for the allocator."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    model = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(smollm2_dir, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(model)
    keys = model.parent / "keys"
    keys.write_text(f"# ours\n{KEY}\n")
    flags = ["--model", str(model), "--served-model-name", MODEL, "--api-key-file", str(keys)]
    flags += ["--max-num-seqs", "128", "--kv-cache-memory", "64MiB", "--body-timeout", "1"]
    flags += ["--write-timeout", f"{WRITE_TIMEOUT_S:g}", "--max-buffered-bytes", str(BUFFERED_BYTES)]
    with serving(model.parent / "log", *flags) as service:
        yield service


@pytest.fixture(scope="module")
def coordinator(tiny: Service) -> int:
    """Its process id."""
    return tiny.coordinator()


def rss_bytes(pid: int) -> int:
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return int(line.split()[1]) << 10


def connect(service: Service, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    parts = urlsplit(service.url)
    connection.connect((parts.hostname, parts.port))
    connection.settimeout(20)
    return connection


def head(path: str, length: int | None) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{size}\r\n\r\n".encode()


def talkative(index: int) -> bytes:
    """A stream of two kilobytes a token, and of more tokens than would fit into any buffer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"client {index}"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    return head("/v1/chat/completions", len(data)) + data


def witness(service: Service) -> tuple[str, float]:
    """Its text, and how long it took."""
    text = ""
    started_s = time.monotonic()
    with (
        httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client,
        client.stream(
            "POST",
            service.url + "/v1/completions",
            json=completion("Once upon a time", stream=True, max_tokens=150, ignore_eos=True),
        ) as answer,
    ):
        assert answer.status_code == 200
        for event in events(answer.iter_lines()):
            text += event["choices"][0]["text"]
    return text, time.monotonic() - started_s


def sip(connections: list[socket.socket], stop: threading.Event) -> None:
    """Each of them reads 100 bytes a second."""
    for connection in connections:
        connection.setblocking(False)
    while not stop.wait(0.1):
        for connection in connections:
            try:
                connection.recv(10)
            except (BlockingIOError, ConnectionResetError):
                continue


def test_a_hundred_that_hardly_read_cost_no_memory_and_slow_nobody(tiny: Service, coordinator: int) -> None:
    alone, usual_s = min((witness(tiny) for _ in range(2)), key=lambda found: found[1])
    before_bytes = rss_bytes(coordinator)
    whole_before = tiny.metric("request_success_total", finished_reason="length")
    bad = [connect(tiny, receive_bytes=4096) for _ in range(NUM_BAD)]
    stop = threading.Event()
    sipping = threading.Thread(target=sip, args=(bad[: NUM_BAD // 2], stop))
    peak_bytes: list[int] = []
    texts: list[str] = []
    times_s: list[float] = []
    sipping.start()
    try:
        for index, connection in enumerate(bad):
            connection.sendall(talkative(index))
        deadline_s = time.monotonic() + 30
        while tiny.busy() or len(times_s) < 3:
            text, took_s = witness(tiny)
            texts.append(text)
            times_s.append(took_s)
            peak_bytes.append(rss_bytes(coordinator))
            assert time.monotonic() < deadline_s, f"not idle: {tiny.busy()}"
        tiny.until_idle()  # while all of them are still connected, as far as they know
    finally:
        stop.set()
        sipping.join()
        for connection in bad:
            connection.close()
    assert set(texts) == {alone}
    assert min(times_s) < 3 * usual_s, (times_s, usual_s)
    assert max(peak_bytes) - before_bytes < BOUND_BYTES, (max(peak_bytes) >> 20, before_bytes >> 20)
    # Which of the two comes first is a matter of how fast tokens come: a busy machine never fills a buffer in time.
    closed = tiny.metric("http_connections_closed_total", reason="write_timeout")
    assert closed + tiny.metric("slow_readers_total") > 0
    whole = tiny.metric("request_success_total", finished_reason="length") - whole_before
    assert whole == len(times_s)  # of the hundred none came to its end


def test_bodies_that_are_too_much_are_refused_in_bounded_memory(tiny: Service, coordinator: int) -> None:
    before_bytes = rss_bytes(coordinator)
    answers = [
        announced(tiny, 100_000_000),
        unannounced(tiny, 100_000_000),
        one_byte_at_a_time(tiny),
        nested(tiny, 3000),
    ]
    assert [
        (int(answer.split()[1]), code in answer) for answer, code in zip(answers, CODES, strict=True)
    ] == [
        (413, True),
        (413, True),
        (408, True),
        (400, True),
    ]
    assert rss_bytes(coordinator) - before_bytes < 32 << 20
    tiny.until_idle()


CODES = (b"body_too_large", b"body_too_large", b"request_body_timeout", b"invalid_json")


def announced(service: Service, num_bytes: int) -> bytes:
    connection = connect(service)
    connection.sendall(head("/v1/completions", num_bytes))
    return all_of(connection, lambda: connection.sendall(b" " * 65536))


def unannounced(service: Service, num_bytes: int) -> bytes:
    connection = connect(service)
    connection.sendall(head("/v1/completions", None))
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"
    sent = iter(range(num_bytes // 65536))

    def send() -> None:
        if next(sent, None) is not None:
            connection.sendall(part)

    return all_of(connection, send)


def one_byte_at_a_time(service: Service) -> bytes:
    connection = connect(service)
    connection.sendall(head("/v1/completions", 1000))
    pause = threading.Event()

    def send() -> None:
        connection.sendall(b" ")
        pause.wait(0.2)

    return all_of(connection, send)


def nested(service: Service, depth: int) -> bytes:
    data = b'{"model": "%s", "prompt": %s}' % (MODEL.encode(), b"[" * depth + b"]" * depth)
    connection = connect(service)
    connection.sendall(head("/v1/completions", len(data)) + data)
    return all_of(connection, lambda: None)


def all_of(connection: socket.socket, send: Callable[[], None]) -> bytes:
    """Sends until an answer comes; the answer."""
    answer = b""
    deadline_s = time.monotonic() + 15
    with connection:
        while not answer and time.monotonic() < deadline_s:
            send()
            connection.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
            connection.settimeout(5)
        while not answer.endswith(b"}}"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
    return answer


def test_a_key_from_a_file_is_seen_nowhere(tiny: Service) -> None:
    """Last but for the service's end: its log is whole."""
    refused = httpx.post(tiny.url + "/v1/completions", headers={"authorization": "Bearer wrong-k3y"}, json={})
    assert refused.status_code == 401
    assert tiny.complete("Hello", max_tokens=1)["finish_reason"] == "length"
    for pid in (tiny.launcher.pid, *tiny.descendants()):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY not in Path(f"/proc/{pid}/comm").read_text()
    workers = set(tiny.children.values())
    assert not any(KEY.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in workers)
    assert KEY not in tiny.log() and "wrong-k3y" not in tiny.log()
    assert KEY not in json.dumps(tiny.workers())


def test_a_second_signal_ends_a_running_stream_with_an_error(tiny: Service) -> None:
    """The end of this service. Cut without a word, a client could not tell it from a lost network."""
    body = completion("Once upon a time", stream=True, max_tokens=8000, ignore_eos=True)
    said = ""
    with (
        httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client,
        client.stream("POST", tiny.url + "/v1/completions", json=body) as answer,
    ):
        for part in answer.iter_text():
            if not said:
                tiny.launcher.send_signal(signal.SIGTERM)
                while client.get(tiny.url + "/health").status_code != 503:
                    time.sleep(0.01)
                tiny.launcher.send_signal(signal.SIGTERM)
            said += part
    assert "event: error" in said and "shutting_down" in said and "[DONE]" not in said
    assert tiny.launcher.wait(10) == 1
