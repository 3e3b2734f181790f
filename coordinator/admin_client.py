"""Asks a running service how it is, over its own HTTP paths, and lays the answer out as a table."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

ANSWER_LIMIT_S = 5.0
DEFAULT_URL = "http://127.0.0.1:8000"


class Unreachable(Exception):
    """No answer, or none that is ours; the message says why."""


@dataclass(frozen=True, slots=True)
class Health:
    """`ok` when a request could be served now; `reason` is the service's own word."""

    ok: bool
    reason: str


def health(url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> Health:
    status, body = _get(f"{url}/health", key, tls)
    return Health(status == 200, body.strip())


def workers(url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> list[dict[str, Any]]:
    """The rows of /admin/workers."""
    status, body = _get(f"{url}/admin/workers", key, tls)
    if status != 200:
        raise Unreachable(f"{url}/admin/workers answered {status}: {body.strip()[:200]}")
    try:
        rows = json.loads(body)
    except json.JSONDecodeError as error:
        raise Unreachable(f"{url}/admin/workers did not answer in JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Unreachable(f"{url}/admin/workers did not answer with a list of workers")
    return rows


def _get(url: str, key: str | None, tls: ssl.SSLContext | None) -> tuple[int, str]:
    """Never through a proxy: it is our own service. `door/tls` says whom an https URL trusts."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        try:
            answer = opener.open(urllib.request.Request(url, headers=headers), timeout=ANSWER_LIMIT_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: {_why(error)}") from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"{reason.verify_message}; name who signed its certificate with --ca-certs FILE, or say --insecure"
    if isinstance(reason, ssl.SSLError) and reason.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "does not speak TLS there; use http://"
    if isinstance(reason, (http.client.RemoteDisconnected, ConnectionResetError)):
        return f"{reason} (if it speaks TLS, use https://)"
    return str(reason)


NOW = ("running", "waiting", "blocks_free", "blocks_cached", "step_ms")
TITLES = {
    "id": "worker",
    "blocks_total": "blocks",
    "blocks_free": "free",
    "blocks_cached": "cached",
    "step_ms": "step ms",
}


def workers_table(rows: list[dict[str, Any]], threads_of_pid: Mapping[int, str] | None = None) -> Table:
    """One line per worker: with what it has on its hands now, or at start with the threads it was given."""
    last = NOW if threads_of_pid is None else ("threads", "address")
    columns = ("id", "role", "pid", "state", "blocks_total", *last)  # as many as 80 characters hold
    gap = 1 if threads_of_pid is None else 2
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold underline")
    for name in columns:
        table.add_column(TITLES.get(name, name), no_wrap=True)
    for row in sorted(rows, key=lambda row: (str(row.get("role")), str(row.get("id")))):
        row = _as_shown(row)
        shown = row if threads_of_pid is None else {**row, "threads": threads_of_pid.get(row.get("pid", -1))}
        table.add_row(*(_cell(shown.get(name)) for name in columns))
    return table


def _as_shown(row: dict[str, Any]) -> dict[str, Any]:
    """Of one that is not there nothing is known: the zeros in its row are no counts."""
    state = row.get("state")
    if state in ("lost", "starting"):
        row = {name: value for name, value in row.items() if name not in ("blocks_total", *NOW)}
    if state == "lost" and row.get("left"):
        state = "left"
    if row.get("overdue"):
        state = "hung"
    becomes = row.get("becomes")
    return {**row, "state": f"{state}, becomes {becomes}" if becomes else state}


def wide_console(*, stderr: bool = False) -> Console:
    """A console that never cuts a table because the output goes to a file or a pipe."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
