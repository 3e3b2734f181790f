"""`python -m bench.preemption`: what a KV pool of half the size that a load wants costs.

One worker that prefills and decodes gets all requests of a load at once, three times:

    wanted      with all the blocks that it comes to hold: the answers to compare with
    half        with half as many blocks: it must choose whom to let in, and put out whom it let in too soon
    just fits   with half as many blocks, and the most sequences at a time with which nobody is put out, found by trying

How long an answer will be the worker cannot know: half of them end by an end token long before their `max_tokens`. The
batches of a run follow from the lengths alone, so what just fits is found with a model that computes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from rich.console import Console
from rich.table import Table

from bench.flag_types import count as whole
from bench.virtual_model import VOCABULARY, VirtualModel, continuation
from bench.virtual_worker import StepTime
from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.counters import HISTOGRAM_BUCKETS
from common.effects import ToFront
from common.messages import Decode, Tokens
from common.request import Attempt, FrontId, Request, RequestId, SamplingParams, WorkerId, pack_ids
from decode_node.preemption import MAX_VICTIM
from decode_node.worker import DecodeWorker
from kernels.loading import load_for_worker
from kernels.runner import ModelRunner
from transfer.isolating import IsolatingSteps
from transfer.receiver import TransferReceiver

BLOCK_SIZE = 16
STEP_TOKENS = 256
LEAST_THROUGHPUT = 0.9
MOST_LOST = 0.1
"""Of all tokens that are computed once, in a load of three batches or more: at first no lengths are known."""
CPU_STEP = StepTime(0.02, 0.0015, 0.0004)

Compute = Callable[[Batch], tuple[Sequence[RowResult], float]]
"""A step's results, and how many seconds it took."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for, and how long its answer will be."""

    prompt_tokens: int
    max_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """`worst_victim`: how often the one was put out that was so most often (an upper bound from 5 on)."""

    num_blocks: int
    max_num_seqs: int
    seconds: float
    answers: tuple[tuple[int, ...], ...]
    most_blocks: int
    preemptions: int
    worst_victim: int
    lost_tokens: int
    computed_once: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    @property
    def lost_share(self) -> float:
        return self.lost_tokens / self.computed_once


def plans(number: int, seed: int, most: int) -> list[Plan]:
    """Prompts and answers of up to `most` tokens each."""
    random = Random(seed)
    made = []
    for index in range(number):
        answer = random.randint(most // 8, most)
        made.append(Plan(random.randint(most // 4, most), answer if index % 2 else most, answer))
    return made


# ---------------------------------------------------------------- one run


def serve(asks: Sequence[Ask], compute: Compute, num_blocks: int, max_num_seqs: int) -> Run:
    pool = BlockPool(num_blocks)
    core = BatchingCore(
        pool,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        prefix_caching=False,
        fingerprint="bench",
    )
    receiver = TransferReceiver(block_bytes=1)
    node = DecodeWorker(core, receiver, fingerprint="bench", block_bytes=1, max_waiting=len(asks))
    answers: dict[RequestId, list[int]] = {}
    for index, ask in enumerate(asks):
        name = RequestId(f"r{index:05d}")
        sampling = SamplingParams(ask.max_tokens, temperature=0.0, end_token_ids=ask.end_ids)
        request = Request(name, pack_ids(ask.prompt), sampling, FrontId("front"))
        answers[name] = []
        node.handle(Decode(name, Attempt(1), request, b""), WorkerId("coordinator"), 0.0)
    now, most_blocks = 0.0, 0
    while not node.idle:
        batch = node.schedule(now)
        assert batch is not None, "idle with somebody waiting"
        most_blocks = max(most_blocks, pool.held)
        results, step_s = compute(batch)
        now += step_s
        for effect in node.finish(batch, results, step_s, now) + node.turn(now):
            if isinstance(effect, ToFront) and isinstance(effect.message, Tokens):
                for row in effect.message.rows:
                    answers[row.id] += row.ids
    counters = node.records.counters
    return Run(
        num_blocks,
        max_num_seqs,
        now,
        tuple(map(tuple, answers.values())),
        most_blocks,
        int(counters.total("num_preemptions_total")),
        _worst(counters.histograms()["request_preemptions"]),
        int(counters.total("lost_tokens_total")),
        sum(len(ask.prompt) for ask in asks) + sum(map(len, answers.values())),
    )


def _worst(histogram: tuple[float, ...]) -> int:
    bounds = [*HISTOGRAM_BUCKETS["request_preemptions"], float(1 << 30)]
    return int(max(bound for bound, samples in zip(bounds, histogram[2:], strict=True) if samples))


# ---------------------------------------------------------------- without a model


def virtual_asks(made: Sequence[Plan], seed: int = 1) -> list[Ask]:
    """Requests whose answers, by the virtual model, are as long as planned."""
    return [_virtual_ask(plan, Random(f"{seed} {index}")) for index, plan in enumerate(made)]


def _virtual_ask(plan: Plan, random: Random) -> Ask:
    while True:
        prompt = tuple(random.randrange(VOCABULARY) for _ in range(plan.prompt_tokens))
        answer = continuation(list(prompt), plan.answer_tokens)
        if answer.index(answer[-1]) == plan.answer_tokens - 1:
            return Ask(prompt, plan.max_tokens, (answer[-1],))


def serve_virtual(asks: Sequence[Ask], num_blocks: int, max_num_seqs: int) -> Run:
    model = VirtualModel(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
    return serve(asks, lambda batch: (model.run(batch), CPU_STEP.seconds(batch)), num_blocks, max_num_seqs)


def seqs_that_just_fit(asks: Sequence[Ask], num_blocks: int, most: int) -> int:
    """The most at a time with which nobody is put out."""
    return next(n for n in count(most, -1) if not serve_virtual(asks, num_blocks, n).preemptions)


def blocks_wanted(asks: Sequence[Ask], max_num_seqs: int) -> int:
    """The most that are held at a time where there are enough for all."""
    enough = sum(-(-(len(ask.prompt) + ask.max_tokens) // BLOCK_SIZE) for ask in asks)
    return serve_virtual(asks, enough, max_num_seqs).most_blocks


# ---------------------------------------------------------------- with one


class Measured:
    """Steps of a real runner; all that happens between two of them counts as time of the second."""

    def __init__(self, runner: ModelRunner) -> None:
        self._steps = IsolatingSteps(runner)
        self._since = time.perf_counter()

    def __call__(self, batch: Batch) -> tuple[Sequence[RowResult], float]:
        results, failed = self._steps.run(batch)
        assert not failed, failed
        before, self._since = self._since, time.perf_counter()
        return results, self._since - before


def real_asks(made: Sequence[Plan], runner: ModelRunner, num_blocks: int, max_num_seqs: int) -> list[Ask]:
    """Requests that end about as planned: by the first token from there on that the answer has not had before."""
    random = Random(7)
    open_asks = [
        Ask(
            tuple(random.randrange(1000, runner.vocab_size) for _ in range(plan.prompt_tokens)),
            plan.max_tokens,
        )
        for plan in made
    ]
    said = serve(open_asks, Measured(runner), num_blocks, max_num_seqs).answers
    asks = []
    for ask, plan, ids in zip(open_asks, made, said, strict=True):
        new = [index for index in range(plan.answer_tokens - 1, len(ids)) if ids.index(ids[index]) == index]
        asks.append(Ask(ask.prompt, ask.max_tokens, (ids[new[0]],) if new else ()))
    return asks


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.preemption", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or hub id (default: the default model)")
    parser.add_argument("--virtual", action="store_true", help="in virtual time, without a model")
    parser.add_argument("--requests", type=whole, default=48, metavar="N")
    parser.add_argument("--max-num-seqs", type=whole, default=16, metavar="N")
    parser.add_argument(
        "--tokens", type=whole, default=96, metavar="N", help="most of a prompt, and of an answer"
    )
    parser.add_argument("--threads", type=whole, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    seqs, made = asked.max_num_seqs, plans(asked.requests, asked.seed, max(8, asked.tokens))
    if asked.virtual:
        asks = virtual_asks(made)
        runs = three_runs(asks, asks, seqs, serve_virtual)
    else:
        enough = seqs * (-(-2 * asked.tokens // BLOCK_SIZE) + 1)
        _, runner = load_for_worker(
            model=asked.model, dtype="auto", device="auto", block_size=BLOCK_SIZE, num_blocks=enough,
            kv_cache_bytes=None, max_num_seqs=seqs, max_model_len=None, threads=asked.threads,
        )  # fmt: skip
        asks = real_asks(made, runner, enough, seqs)
        wanted = serve(asks, Measured(runner), enough, seqs)
        alike = [
            Plan(len(ask.prompt), ask.max_tokens, len(ids))
            for ask, ids in zip(asks, wanted.answers, strict=True)
        ]
        runs = three_runs(
            asks, virtual_asks(alike), seqs, lambda a, blocks, n: serve(a, Measured(runner), blocks, n)
        )
    Console().print(_table(runs))
    faults = faults_of(runs)
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


def three_runs(
    asks: Sequence[Ask], virtual: Sequence[Ask], seqs: int, run: Callable[[Sequence[Ask], int, int], Run]
) -> dict[str, Run]:
    """`virtual` are as long as `asks`, for the virtual model."""
    wanted = blocks_wanted(virtual, seqs)
    half = wanted // 2
    return {
        "wanted": run(asks, wanted + seqs, seqs),  # one each to spare: the watermark
        "half": run(asks, half, seqs),
        "just fits": run(asks, half, seqs_that_just_fit(virtual, half, seqs)),
    }


def faults_of(runs: dict[str, Run]) -> list[str]:
    """What is not as it must be, in words."""
    wanted, half, fits = runs["wanted"], runs["half"], runs["just fits"]
    rate = half.tokens_per_s / fits.tokens_per_s
    return [
        why
        for why, wrong in (
            (
                "an answer differs from that with all blocks",
                not wanted.answers == half.answers == fits.answers,
            ),
            (f"{rate:.2f} of the throughput of what just fits", rate < LEAST_THROUGHPUT),
            (f"{half.lost_share:.3f} of the work was lost", half.lost_share > MOST_LOST),
            (f"one request was put out {half.worst_victim} times", half.worst_victim > MAX_VICTIM),
        )
        if wrong
    ]


def _table(runs: dict[str, Run]) -> Table:
    headings = ("run", "blocks", "seqs", "answer tokens/s", "put out", "one of them", "work lost", "exact")
    table = Table(title="a pool of half of what the load wants")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, run in runs.items():
        exact = "yes" if run.answers == runs["wanted"].answers else "NO"
        table.add_row(
            name, f"{run.num_blocks}", f"{run.max_num_seqs}", f"{run.tokens_per_s:.1f}", f"{run.preemptions}",
            f"{run.worst_victim}", f"{run.lost_share:.1%}", exact,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
