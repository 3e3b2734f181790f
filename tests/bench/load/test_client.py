"""What the client measures, against a real server whose chunks leave at known times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from bench.load.client import BadUrl, Client, target_of
from bench.load.records import Planned, Record
from tests.bench.load.scripted_server import (
    END,
    EVENTS,
    HANG_UP,
    Script,
    Step,
    chunk,
    done,
    event,
    scripted,
    spoken,
    status,
    text,
    usage,
)

LATE_S = 0.1
"""What a busy test machine may add to a time. Steps lie further apart."""


def ask_and_watch(
    script: Script, planned: Planned | None = None, *, times: int = 1, timeout_s: float = 5.0
) -> tuple[list[Record], list[float]]:
    """Records of requests sent one after the other by one client, and when the server's steps left: on one clock."""

    async def run(url: str) -> list[Record]:
        target = target_of(url, "/v1/completions", None, "")
        client = Client(target, timeout_s, 5.0)
        request = target.request(b'{"max_tokens": 4, "prompt": [1, 2, 3]}')
        found = [await client.ask(planned or Planned(0, 0.0, 3, 4), request, 0.0) for _ in range(times)]
        client.close()
        return found

    with scripted(script) as server:
        return asyncio.run(run(server.url)), server.stepped_s


def ask(
    script: Script, planned: Planned | None = None, *, times: int = 1, timeout_s: float = 5.0
) -> list[Record]:
    return ask_and_watch(script, planned, times=times, timeout_s=timeout_s)[0]


def assert_seen(seen_s: Sequence[float], left_s: Sequence[float]) -> None:
    """Each time is that of its bytes: not before they left, and soon after."""
    assert len(seen_s) == len(left_s)
    assert all(0 <= seen - left < LATE_S for seen, left in zip(seen_s, left_s, strict=True)), (seen_s, left_s)


def test_first_text_gaps_and_end_are_those_of_the_server() -> None:
    (record,), left_s = ask_and_watch(lambda body: spoken(body, first_s=0.2, gap_s=0.15))
    assert record.outcome == "ok"
    assert_seen(record.text_s, left_s[1:5])
    assert_seen([record.end_s], left_s[5:])
    assert record.ttft_s is not None and record.ttft_s >= 0.2
    assert record.ttft_s == record.text_s[0] - record.sent_s
    assert record.gaps_s == [b - a for a, b in pairwise(record.text_s)]
    assert record.tpot_s == pytest.approx(sum(record.gaps_s) / 3)
    assert (record.prompt_tokens, record.output_tokens, record.request_id) == (3, 4, "cmpl-7")


def test_chunks_without_text_are_no_first_token_and_no_gap() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    steps: list[Step] = [
        (0.0, EVENTS + chunk(b": keep-alive\n\n")),
        (0.12, role),
        (0.12, text("")),
        (0.12, text("x")),
        (0.12, text("")),
        (0.12, text("y", finish_reason="length")),
        (0.0, usage(3, 4) + done()),
    ]
    (record,), left_s = ask_and_watch(lambda _: steps)
    assert_seen(record.text_s, [left_s[3], left_s[5]])
    assert record.tpot_s == pytest.approx(record.gaps_s[0] / 3), (
        "four tokens by the server's count, in two chunks"
    )


def test_a_chunk_has_the_time_of_its_first_byte() -> None:
    whole = text("torn over three packets")
    steps: list[Step] = [(0.0, EVENTS), (0.05, whole[:9]), (0.15, whole[9:40]), (0.15, whole[40:])]
    (record,), left_s = ask_and_watch(lambda _: [*steps, (0.0, usage(3, 4) + done())])
    assert_seen(record.text_s, left_s[1:2])


def test_connections_are_kept_and_their_opening_counts() -> None:
    with scripted(spoken) as server:

        async def run() -> list[Record]:
            target = target_of(server.url, "/v1/completions", None, "")
            client = Client(target, 5.0, 5.0)
            request = target.request(b'{"max_tokens": 2, "prompt": [1]}')
            found = [await client.ask(Planned(i, 0.0, 1, 2), request, time.perf_counter()) for i in range(3)]
            client.close()
            return found

        first, *later = asyncio.run(run())
    assert server.connections == 1
    assert first.connect_s > 0
    assert [record.connect_s for record in later] == [0, 0]


def test_who_is_to_leave_leaves_in_the_middle() -> None:
    began = time.perf_counter()
    (record,) = ask(lambda body: spoken(body, gap_s=1.0), Planned(0, 0.0, 3, 4, leave_after=2))
    assert (record.outcome, len(record.text_s), record.fault) == ("left", 2, "")
    assert time.perf_counter() - began < 2.5


@pytest.mark.parametrize(
    ("steps", "outcome", "fault", "words"),
    [
        ([(0.0, status(429, b'{"error":{"message":"no room"}}'))], "rejected", "http_429", "no room"),
        ([(0.0, status(503))], "rejected", "http_503", ""),
        ([(0.0, status(400, b"the prompt is odd"))], "failed", "http_400", "odd"),
        ([(0.0, status(200, b'{"choices": []}'))], "failed", "bad_stream", "no event stream"),
        ([(0.0, HANG_UP)], "failed", "connection_lost", ""),
        ([(0.0, EVENTS + text("a")), (0.0, HANG_UP)], "failed", "connection_lost", ""),
        ([(0.0, EVENTS + text("a") + END)], "failed", "truncated", "without [DONE]"),
        ([(0.0, EVENTS + event(b"{never closed"))], "failed", "bad_stream", "never closed"),
        ([(0.0, EVENTS + event({"choices": 7}))], "failed", "bad_stream", "no chunk"),
        ([(0.0, EVENTS + event([1]))], "failed", "bad_stream", "no object"),
        ([(0.0, EVENTS + chunk(b"<html>\n"))], "failed", "bad_stream", "<html>"),
        ([(0.0, b"220 smtp ready\r\n\r\n")], "failed", "bad_http", ""),
        (
            [(0.0, EVENTS + text("a") + event({"error": {"message": "out of memory"}}))],
            "failed",
            "error_event",
            "memory",
        ),
        ([(0.0, EVENTS + usage(3, 1) + done())], "failed", "no_text", "without any text"),
        ([(0.0, EVENTS), (9.0, text("a"))], "failed", "timeout", "no end within"),
    ],
)
def test_what_goes_wrong_has_a_name(steps: list[Step], outcome: str, fault: str, words: str) -> None:
    (record,) = ask(lambda _: steps, timeout_s=0.3)
    assert (record.outcome, record.fault) == (outcome, fault), record.words
    assert words in record.words


def test_after_a_fault_the_next_request_has_a_connection_of_its_own() -> None:
    asked: list[dict[str, Any]] = []

    def script(body: dict[str, Any]) -> list[Step]:
        asked.append(body)
        return [(0.0, EVENTS + event(b"{"))] if len(asked) == 1 else spoken(body)

    assert [record.outcome for record in ask(script, times=2)] == ["failed", "ok"]


def test_nobody_there_is_a_fault_of_that_request() -> None:
    async def run() -> Record:
        target = target_of("http://127.0.0.1:1", "/v1/completions", None, "")
        return await Client(target, 5.0, 5.0).ask(Planned(0, 0.0, 1, 1), b"", time.perf_counter())

    record = asyncio.run(run())
    assert (record.outcome, record.fault) == ("failed", "connect_failed")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999999"])
def test_a_bad_url_is_said(url: str) -> None:
    with pytest.raises(BadUrl):
        target_of(url, "/v1/completions", None, "")


def test_the_key_and_the_host_are_told() -> None:
    target = target_of("http://example.org:81/prefix", "/v1/completions", None, "secret")
    head = target.request(b"{}").decode()
    assert head.startswith("POST /prefix/v1/completions HTTP/1.1\r\nHost: example.org:81\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert head.endswith("Content-Length: 2\r\n\r\n{}")
