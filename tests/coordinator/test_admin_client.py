from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from coordinator import admin_client
from coordinator.admin_client import Unreachable, workers_table
from coordinator.launcher import reserve_port

ROWS: list[dict[str, Any]] = [
    {
        "id": "prefill-0",
        "role": "prefill",
        "pid": 1234567,
        "host": "here",
        "address": "tcp://127.0.0.1:45678",
        "state": "draining",
        "running": 12,
        "waiting": 3,
        "blocks_total": 29123,
        "blocks_free": 29000,
        "blocks_cached": 28000,
        "step_ms": 341.44,
    },
    {"id": "decode-0", "role": "decode", "pid": 99, "state": "ready"},
]


def drawn(threads: dict[int, str] | None, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(workers_table(ROWS, threads))
    return out.getvalue()


def test_the_table_at_start_fits_a_plain_terminal_whole() -> None:
    text = drawn({1234567: "2+2", 99: "1"}, 80)
    assert "…" not in text
    words = ["prefill-0", "prefill", "1234567", "draining", "29123", "2+2", "tcp://127.0.0.1:45678"]
    assert next(line for line in text.splitlines() if "1234567" in line).split() == words


def test_status_shows_what_is_going_on_and_a_dash_for_what_is_not_known() -> None:
    lines = [line.split() for line in drawn(None, 80).splitlines()]
    assert ["decode-0", "decode", "99", "ready", "–", "–", "–", "–", "–", "–"] in lines
    busy = ["prefill-0", "prefill", "1234567", "draining", "29123", "12", "3", "29000", "28000", "341.4"]
    assert any(line == busy for line in lines)


def test_nobody_there_is_said_so() -> None:
    with reserve_port("127.0.0.1") as silent, pytest.raises(Unreachable, match="refused"):
        admin_client.workers(f"http://127.0.0.1:{silent.getsockname()[1]}")
