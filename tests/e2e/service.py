"""A whole service as a person starts it: `kvferry serve` in a process group of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import alive, command_of

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
START_LIMIT_S = 180.0  # on a machine that others use too; 8 s on one of our own
LEAVE_LIMIT_S = 40.0
IDLE_LEAVES_WITHIN_S = 5.0  # BR-142; 0.6 s on a machine of our own
HEARTBEAT_S = 0.5
BF16_BLOCK_BYTES = 368_640  # 16 tokens, 30 layers, K and V, 3 heads of 64, two bytes each


class Api:
    """What tests ask a running service over HTTP, whoever started it. `url` is set once it is known."""

    def __init__(self, key: str = "") -> None:
        self.url = ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(verify=False, trust_env=False, timeout=120, headers=headers)

    def get(self, path: str) -> Any:
        answer = self._client.get(self.url + path)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def workers(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.get("/admin/workers"))

    def worker(self, name: str) -> dict[str, Any]:
        (row,) = [row for row in self.workers() if row["id"] == name]
        return row

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {"content-type": "application/json"}
        return self._client.post(self.url + path, content=content, headers=headers)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A text completion's only choice, greedy unless said otherwise, with its `id` and `usage`."""
        answer = self.post("/v1/completions", completion(prompt, **fields))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return {**body["choices"][0], "id": body["id"], "usage": body["usage"]}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        text = self._client.get(self.url + "/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"kvferry_{name}" and labels.items() <= sample.labels.items()
        )

    def counted(self, name: str, **labels: str) -> float:
        """Sum of a counter that workers keep, everything until now included: two heartbeats bring it."""
        time.sleep(2.4 * HEARTBEAT_S)
        return self.metric(name, **labels)

    def busy(self) -> dict[str, Any]:
        """Everything that is not as in an idle service; empty when it is idle."""
        found: dict[str, Any] = {}
        for row in self.workers():
            if row["state"] == "lost":
                continue  # nobody knows what it has
            if row["blocks_held"] or row["running"] or row["waiting"]:
                found[row["id"]] = {key: row[key] for key in ("blocks_held", "running", "waiting")}
            if row["blocks_free"] + row["blocks_cached"] + row["blocks_held"] != row["blocks_total"]:
                found[f"{row['id']} blocks"] = row
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if (value := self.metric(gauge)) != 0:
                found[gauge] = value
        return found

    def until_idle(self, limit_s: float = 20.0) -> float:
        """Seconds until every gauge and every block count is back; fails after `limit_s`."""
        started = time.monotonic()
        while busy := self.busy():
            assert time.monotonic() - started < limit_s, f"still busy after {limit_s:g} s: {busy}"
            time.sleep(0.02)
        return time.monotonic() - started


def _by_pairs(flags: Sequence[str]) -> Sequence[str]:
    """Every prompt goes by way of the prefill pool where there is one, as tests of transfers want it, unless `flags`
    say otherwise."""
    return flags if "--local-prefill" in flags else ("--local-prefill", "never", *flags)


class Service(Api):
    """Started and ready when made. `stop` asserts a clean end."""

    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        self.key = _first_key(flags)
        super().__init__(self.key)
        started = time.monotonic()
        with log.open("wb") as out:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "coordinator.cli", "serve", "--port", "0", *_by_pairs(flags)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.url = self._until_ready()
            self.ready_after_s = time.monotonic() - started
            self.children = {row["id"]: row["pid"] for row in self.workers()}
        except BaseException:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            raise

    def _until_ready(self) -> str:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            said = self.log()
            found = re.search(r"^URL +(http://\S+)/v1$", said, re.MULTILINE)
            if found and "try it" in said:
                return found[1]
            assert self.launcher.poll() is None, f"ended with {self.launcher.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"not ready after {START_LIMIT_S:g} s:\n{said}"
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def descendants(self) -> list[int]:
        """Process ids of all its children, by what the system says."""
        found = [self.launcher.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split()]
        return found[1:]

    def coordinator(self) -> int:
        """Its process id."""
        (pid,) = (pid for pid in self.descendants() if "coordinator" in command_of(pid))
        return pid

    def stop(self) -> None:
        """SIGTERM: exit code 0 and nobody left behind."""
        self._client.close()
        if self.launcher.poll() is None:
            before, began = self.descendants(), time.monotonic()
            self.launcher.send_signal(signal.SIGTERM)
            try:
                code = self.launcher.wait(LEAVE_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.launcher.pid, signal.SIGKILL)
                raise AssertionError(f"does not stop:\n{self.log()}") from None
            assert code == 0, f"exit code {code}:\n{self.log()}"
            assert time.monotonic() - began < IDLE_LEAVES_WITHIN_S, self.log()
            assert [pid for pid in before if alive(pid)] == []
        faults = [line for line in self.log().splitlines() if "Traceback" in line or "Error" in line]
        assert faults == [], self.log()


def _first_key(flags: Sequence[str]) -> str:
    """What every question of ours brings: the one of the flag, or the first of the file."""
    if "--api-key" in flags:
        return flags[flags.index("--api-key") + 1]
    if "--api-key-file" in flags:
        lines = Path(flags[flags.index("--api-key-file") + 1]).read_text().splitlines()
        return next(line for line in lines if line and not line.startswith("#"))
    return ""


def completion(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}


def chat(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def refusals(service: Service, path: str, bad: dict[str, Any]) -> dict[str, Any]:
    """The error object of a 400, whole and streamed alike."""
    good = chat("hi") if "chat" in path else completion("One, two,")
    answers = [service.post(path, good | bad | {"stream": stream}) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [400, 400], (bad, answers[0].text)
    assert answers[0].json() == answers[1].json()
    error: dict[str, Any] = answers[0].json()["error"]
    assert error["message"] and error["code"]
    return error


def strict_json(text: str) -> dict[str, Any]:
    """What Python's parser takes beside JSON (NaN, Infinity) fails."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=no_constant)
    return found


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Service]:
    service = Service(log, *flags)
    try:
        yield service
    except BaseException:
        print(service.log())
        if service.launcher.poll() is None:
            os.killpg(service.launcher.pid, signal.SIGKILL)
        raise
    service.stop()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of an SSE stream; fails unless it ends in [DONE]."""
    done = False
    for line in lines:
        if line.startswith("data: "):
            assert not done, "something after [DONE]"
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    assert done, "the stream ended without [DONE]"


def streamed(
    url: str, prompt: str | list[int], on_text: Callable[[str], None] | None = None, **fields: Any
) -> str:
    """The text of a streamed completion; `on_text` hears each piece."""
    text = ""
    body = completion(prompt, stream=True, **fields)
    with (
        httpx.Client(verify=False, trust_env=False, timeout=120) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for event in events(answer.iter_lines()):
            piece = event["choices"][0]["text"]
            text += piece
            if piece and on_text is not None:
                on_text(piece)
    return text
