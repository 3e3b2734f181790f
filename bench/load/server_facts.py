"""What a service says of itself before and after a run: models, version, counters, workers, timelines.

Everything is optional: a server that has none of these paths is measured all the same. Questions are asked outside of
the measured time; a kvferry keeps the timelines of the 1024 requests that ended last.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.load.metrics_text import grown, histogram_quantile, parse_metrics, went_back
from bench.load.records import Record
from bench.load.statistics import Distribution, distribution

ANSWER_LIMIT_S = 10.0
HEARTBEATS_S = 1.2
"""What workers count comes with their heartbeats, twice a second."""
KEPT_TIMELINES = 1000
COUNTERS = {
    "preemptions": "num_preemptions_total",
    "transfer_bytes": "kv_transfer_bytes_total",
    "transfer_failures": "kv_transfer_failures_total",
    "migrated": "requests_migrated_total",
    "lost_tokens": "lost_tokens_total",
    "rejected": "requests_rejected_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
}
HISTOGRAMS = {
    "queue": "request_queue_time_seconds",
    "handover_gap": "handover_gap_seconds",
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "step": "step_seconds",
}


class Unreachable(Exception):
    """Nobody answers there at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`kind` is kvferry, vllm or other. `settings` of a kvferry are those of its workers."""

    kind: str
    version: str
    model: str
    max_model_len: int | None
    workers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What the server counted during the run. Milliseconds; quantiles of `histograms` are read off buckets, those
    of `queue` and `handover_gap` in `timelines` are exact, over as many requests as their `count`. All are empty where
    a counter went back: what the server counts began anew in the midst of the run."""

    counters: dict[str, float]
    histograms_ms: dict[str, dict[str, float]]
    timelines_ms: dict[str, Distribution]
    restarted: bool = False


class Server:
    """Asks over one kept connection. Raises Unreachable from `facts` alone: a server that dies later is a fact."""

    def __init__(self, base_url: str, api_key: str, tls: ssl.SSLContext | None) -> None:
        self._parts = urlsplit(base_url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = tls
        self._connection: http.client.HTTPConnection | None = None

    def facts(self, model: str | None) -> Facts:
        status, text = self._get("/v1/models")
        if status in (401, 403):
            raise Unreachable(f"/v1/models answered {status}: give the key with --api-key")
        cards = _list(_json(text).get("data")) if status == 200 else []
        card = next((card for card in cards if model in (None, card.get("id"))), {})
        name = model or str(card.get("id") or "")
        if not name:
            raise Unreachable(f"/v1/models answered {status} and names no model: give it with --model")
        version = str(_json(self._soft("/version")).get("version", ""))
        kind = _kind(self._soft("/metrics"))
        context = card.get("max_model_len")
        return Facts(
            kind,
            version,
            name,
            context if isinstance(context, int) else None,
            _list(_json(self._soft("/admin/workers"), [])) if kind == "kvferry" else [],
        )

    def scrape(self) -> dict[str, float]:
        """Empty where there is nothing to read."""
        try:
            return parse_metrics(self._soft("/metrics"))
        except (ValueError, KeyError):
            return {}

    def after(
        self, before: dict[str, float], facts: Facts, records: Sequence[Record], seed: int
    ) -> ServerSide:
        """`before`: the scrape from when the run began."""
        if facts.kind == "kvferry":
            time.sleep(HEARTBEATS_S)
        after = self.scrape()
        if went_back(before, after):
            return ServerSide({}, {}, {}, restarted=True)
        counters = {name: grown(sample, before, after) for name, sample in COUNTERS.items()}
        return ServerSide(
            {name: value for name, value in counters.items() if value is not None},
            {
                name: found
                for name, sample in HISTOGRAMS.items()
                if (found := _quantiles(sample, before, after))
            },
            self._timelines(records, seed) if facts.kind == "kvferry" else {},
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _timelines(self, records: Sequence[Record], seed: int) -> dict[str, Distribution]:
        """Queue time: at the coordinator and, for a place in a batch, at the workers."""
        queue: list[list[float]] = []
        for record in [record for record in records if record.outcome == "ok"][-KEPT_TIMELINES:]:
            found = _json(self._soft(f"/admin/requests/{record.request_id}"))
            if "coordinator_seconds" in found:
                waited_s = float(found["coordinator_seconds"].get("waiting", 0.0))
                waited_s += sum(
                    float(part["seconds"].get("queued", 0.0)) for part in found.get("workers", ())
                )
                queue.append([waited_s * 1e3])
        found_queue = distribution(queue, seed)
        return {} if found_queue is None else {"queue": found_queue}

    def _soft(self, path: str) -> str:
        """ "" for whatever is not there."""
        try:
            status, text = self._get(path)
        except Unreachable:
            return ""
        return text if status == 200 else ""

    def _get(self, path: str) -> tuple[int, str]:
        for fresh in (False, True):
            try:
                if fresh or self._connection is None:
                    self._connection = self._connect()
                self._connection.request("GET", self._parts.path.rstrip("/") + path, headers=self._headers)
                answer = self._connection.getresponse()
                return answer.status, answer.read().decode("utf-8", "replace")
            except (OSError, http.client.HTTPException) as error:
                if fresh:
                    raise Unreachable(
                        f"{self._parts.geturl()}{path}: {error or type(error).__name__}"
                    ) from error
        raise AssertionError("the second try returns or raises")

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=ANSWER_LIMIT_S, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=ANSWER_LIMIT_S)


def _kind(metrics: str) -> str:
    if "\nkvferry_" in metrics:
        return "kvferry"
    return "vllm" if "\nvllm:" in metrics else "other"


def _quantiles(name: str, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    found = {f"p{round(q * 100)}": histogram_quantile(name, q, before, after) for q in (0.5, 0.95, 0.99)}
    return {key: value * 1e3 for key, value in found.items() if value is not None}


def _json(text: str, default: Any = None) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, (dict, list)) else ({} if default is None else default)


def _list(found: Any) -> list[dict[str, Any]]:
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
