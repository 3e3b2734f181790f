"""One run from end to end: learns what the server takes, warms it, loads it, asks what it counted.

What an earlier run of a sweep learned (`Learned`) holds for the next.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.load.bodies import BodyShape
from bench.load.client import Client, Target
from bench.load.plan import Load, plan, warmups
from bench.load.prompts import PromptMaker, Words, measured_words, words_maker
from bench.load.records import Planned, Record, Run
from bench.load.runner import Runner
from bench.load.server_facts import Facts, Server, ServerSide

WARMUPS_AT_ONCE = 4
PROBE = Planned(-(2**30), 0.0, 32, 1)
TAKES_NO_IDS = (400, 415, 422, 500)
FEW_WORDS, MANY_WORDS = 16, 80


class CannotMeasure(Exception):
    """The service refuses what the run is made of; the message has its words."""


@dataclass(frozen=True, slots=True)
class Learned:
    """None: prompts are ids."""

    words: Words | None


@dataclass(frozen=True, slots=True)
class Limits:
    max_concurrency: int | None
    request_timeout_s: float
    connect_timeout_s: float
    num_warmups: int


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same over several runs."""

    target: Target
    server: Server
    facts: Facts
    shape: BodyShape
    limits: Limits
    low_id: int
    high_id: int
    ask_server: bool

    def client(self) -> Client:
        return Client(self.target, self.limits.request_timeout_s, self.limits.connect_timeout_s)

    def prompts(self, load: Load, learned: Learned, seed: int) -> PromptMaker:
        if learned.words is not None:
            return words_maker(seed, learned.words, load.block_tokens)
        return PromptMaker(seed, self.low_id, self.high_id + 1, load.block_tokens)


async def learn(bench: Bench, prompt_as: str, seed: int) -> Learned:
    """How prompts are to be written for this server. Raises CannotMeasure."""
    client = bench.client()
    try:
        if prompt_as != "words" and not bench.shape.chat:
            ids = PromptMaker(seed, bench.low_id, bench.high_id + 1)
            record = await _probe(bench, client, PROBE, ids)
            if record.prompt_tokens == PROBE.prompt_tokens or (record.outcome == "ok" and prompt_as == "ids"):
                return Learned(None)
            if prompt_as == "ids" or (record.status not in (200, *TAKES_NO_IDS)):
                raise CannotMeasure(_refusal(record))
        return Learned(await _learn_words(bench, client, seed))
    finally:
        client.close()


async def _learn_words(bench: Bench, client: Client, seed: int) -> Words:
    maker = words_maker(seed, Words(), 0)
    counted: list[tuple[int, int]] = []
    for count in (FEW_WORDS, MANY_WORDS):
        planned = replace(PROBE, index=PROBE.index + count, prompt_tokens=count)
        record = await _probe(bench, client, planned, maker)
        if record.prompt_tokens is None:
            if record.outcome == "ok":
                return Words()  # it does not count: words are the best that is known
            raise CannotMeasure(_refusal(record))
        counted.append((count, record.prompt_tokens))
    return measured_words(*counted)


async def _probe(bench: Bench, client: Client, planned: Planned, prompts: PromptMaker) -> Record:
    return await client.ask(planned, bench.target.request(bench.shape.body(planned, prompts)), 0.0)


def _refusal(record: Record) -> str:
    return (
        f"the service does not answer a small request: {record.fault or 'no usage'}: {record.words}".rstrip(
            ": "
        )
    )


async def measure(
    bench: Bench, load: Load, learned: Learned, seed: int, tell: Callable[[int, int, int], None]
) -> tuple[Run, ServerSide | None]:
    """Raises CannotMeasure where every warm-up fails."""
    client = bench.client()
    prompts = bench.prompts(load, learned, seed)

    def write(planned: Planned) -> bytes:
        return bench.target.request(bench.shape.body(planned, prompts))

    try:
        await _warm_up(client, write, warmups(load, bench.limits.num_warmups, seed))
        before = await asyncio.to_thread(bench.server.scrape) if bench.ask_server else {}
        runner = Runner(client, write, bench.limits.max_concurrency, tell, load.closed_for_s)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, runner.stop)
        try:
            run = await runner.run(plan(load, seed))
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    finally:
        client.close()
    if not bench.ask_server:
        return run, None
    return run, await asyncio.to_thread(bench.server.after, before, bench.facts, run.records, seed)


async def _warm_up(client: Client, write: Callable[[Planned], bytes], planned: list[Planned]) -> None:
    if not planned:
        return
    run = await Runner(client, write, WARMUPS_AT_ONCE, lambda *_: None).run(planned)
    if not any(record.outcome == "ok" for record in run.records):
        raise CannotMeasure(_refusal(run.records[0]))
