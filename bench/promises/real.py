"""The same loads against real processes: `kvferry serve` with tiers in a file of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.against_peer.servers import ServerFault, Target, free_port, running
from bench.load.client import Client, target_of
from bench.load.prompts import Words, words_maker
from bench.load.records import Planned, Record
from bench.load.runner import Runner
from bench.promises.asked import Asked, Told
from bench.promises.scenarios import Capacity, time_s
from bench.virtual_worker import StepTime
from common.config import Tier

REQUEST_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 10.0
WARM_UP = ((1, 500, 8), (3, 250, 16), (16, 40, 32), (2, 300, 6), (6, 80, 24))
"""Requests at once, their prompts and answers."""
KNOWN_WITHIN_S = 60.0


class RealService:
    """One that runs; its tiers are those it was started with."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._model = str(self._get("/v1/models")["data"][0]["id"])
        self._target = target_of(url, "/v1/completions", None, "")
        self._seed = 0

    def run(self, asked: Sequence[Asked]) -> list[Told]:
        """To the end of all of them. Times of a request count from when it was really sent."""
        self._seed += 1  # no run finds its prompts in the cache of an earlier one
        # Of words: what a model answers to random ids has tokens without text, and two steps look like one gap.
        prompts = words_maker(self._seed, Words(), 0)
        plan = [Planned(one.index, one.at_s, one.prompt_tokens, one.output_tokens) for one in asked]
        by_index = {one.index: one for one in asked}

        def written(planned: Planned) -> bytes:
            one = by_index[planned.index]
            fields = {
                "model": self._model,
                "max_tokens": one.output_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "min_tokens": one.output_tokens,  # with ignore_eos ends would be drawn, which have no text
                "service_tier": one.tier,
                "user": one.tenant,
            }
            body = f'{json.dumps(fields)[:-1]},"prompt":{prompts.as_json(planned)}}}'
            return self._target.request(body.encode())

        async def all_of_it() -> tuple[Record, ...]:
            client = Client(self._target, REQUEST_TIMEOUT_S, CONNECT_TIMEOUT_S)
            try:
                return (await Runner(client, written, None, lambda *_: None).run(plan)).records
            finally:
                client.close()

        return [_told(by_index[record.index], record) for record in asyncio.run(all_of_it())]

    def warm_up(self) -> None:
        """Until every worker has said its step times, of steps of many shapes: full batches and long prompts too.
        Raises ServerFault."""
        until = time.monotonic() + KNOWN_WITHIN_S
        for number in itertools.count():
            count, prompt, output = WARM_UP[number % len(WARM_UP)]
            self.run(
                [Asked(n, 0.02 * n, "default", "warm-up", prompt + number, output) for n in range(count)]
            )
            unknown = [row["id"] for row in self.workers() if not row["step_model"]]
            if number + 1 >= len(WARM_UP) and not unknown:
                return
            if time.monotonic() > until:
                raise ServerFault(
                    f"nothing is known of the steps of {unknown} after {KNOWN_WITHIN_S:g} s of load"
                )

    def workers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._get("/admin/workers")
        return rows

    def step_times(self) -> dict[str, StepTime]:
        """As the workers of each role have fitted them, the first of each."""
        found: dict[str, StepTime] = {}
        for row in self.workers():
            fixed, per_row, per_context, per_chunk = row["step_model"]
            # A decode row is one of the tokens that `StepTime` counts, and no chunk to the model.
            time = StepTime(fixed, max(0.0, per_row - per_chunk), per_chunk, per_context)
            found.setdefault(row["role"], time)
        return found

    def capacity(self, rows: int) -> Capacity:
        times = self.step_times()
        by_role = {role: sum(row["role"] == role for row in self.workers()) for role in times}
        decode = times["decode"]
        return capacity_of(
            times.get("prefill", decode), decode, by_role.get("prefill", 0), by_role["decode"], rows
        )

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


def capacity_of(
    prefill: StepTime, decode: StepTime, num_prefill: int, num_decode: int, rows: int, budget: int = 256
) -> Capacity:
    """By step times alone: full chunks on one side, full batches on the other."""
    step_s, decode_s = time_s(prefill, 1, budget, budget), time_s(decode, rows, rows, 300 * rows)
    return Capacity((num_prefill or num_decode) * budget / step_s, num_decode * rows / decode_s)


def _told(one: Asked, record: Record) -> Told:
    outcome = {"ok": "ok", "rejected": "refused"}.get(record.outcome, "failed")
    sent = replace(one, at_s=record.sent_s)
    return Told(sent, outcome, record.text_s, record.end_s)  # type: ignore[arg-type]


@contextmanager
def serving(tiers: Mapping[str, Tier], *flags: str) -> Iterator[RealService]:
    """A service of this machine while the block runs, warmed up."""
    with TemporaryDirectory() as folder:
        config, log = Path(folder, "tiers.toml"), Path(folder, "log")
        config.write_text("".join(_table(name, tier) for name, tier in tiers.items()))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "coordinator.cli",
            "serve",
            "--port",
            str(port),
            "--config",
            str(config),
        ]
        with running([*command, *flags], Target(url, ""), log):
            service = RealService(url)
            service.warm_up()
            yield service


def _table(name: str, tier: Tier) -> str:
    given = tier.model_dump(exclude_none=True, exclude_defaults=True)
    return f"[tiers.{name}]\n" + "".join(f"{key} = {value}\n" for key, value in given.items())
