"""A step that raises: its rows are tried alone, the guilty one is named, the others lose nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from common.batching import Batch, BatchingCore
from common.blocks import BlockPool
from common.config import WorkerSettings
from common.lifecycle import Phase
from common.request import Attempt, FrontId, Request, RequestId, SamplingParams, pack_ids
from kernels.cache import CacheLayout, PagedCache
from kernels.step import TokenLogprob
from prefill_node.scheduler import PrefillScheduler
from transfer.worker_process import CPU_STEP_TOKENS, run_isolating, tokens_of_a_step

POISON, OVERFLOW = 666, 667


@dataclass(frozen=True, slots=True)
class Result:
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[None, ...]
    prompts: Mapping[int, tuple[TokenLogprob, ...]]
    faults: Mapping[int, str] = field(default_factory=dict)


class PoisonableRunner:
    """Raises on one token, overflows on another; the next token of the rest is their last one and one more. Tells
    of a prompt what its last token is."""

    cache: PagedCache
    max_model_len = 100
    max_num_seqs = 8
    vocab_size = 1000

    def __init__(self) -> None:
        self.runs: list[int] = []

    def describe(self) -> dict[str, str | int | float]:
        return {}

    def prepare_grammars(self) -> None:
        pass

    def has_grammar(self, kind: str, text: str) -> bool:
        return True

    def compile_grammar(self, kind: str, text: str) -> str | None:
        return None

    def hold_grammar(self, kind: str, text: str) -> None:
        pass

    def let_grammar_go(self, kind: str, text: str) -> None:
        pass

    def run(self, batch: Batch) -> Result:
        self.runs.append(len(batch.slots))
        if POISON in batch.token_ids:
            raise RuntimeError("boom")
        lasts, first = [], 0
        for count in batch.counts:
            first += count
            lasts.append(batch.token_ids[first - 1])
        faults = {row: "overflow" for row, last in enumerate(lasts) if last == OVERFLOW}
        ids = tuple(() if row in faults else (last + 1,) for row, last in enumerate(lasts))
        prompts = {
            row: (TokenLogprob(last, -float(last), ()),) for row, last in enumerate(lasts) if last < 500
        }
        return Result(ids, (None,) * len(ids), prompts, faults)


def step_of(*lasts: int) -> Batch:
    core = BatchingCore(
        BlockPool(32),
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefix_caching=False,
        fingerprint="f",
    )
    scheduler = PrefillScheduler(core)
    for index, last in enumerate(lasts):
        request = Request(
            RequestId(f"r{index}"), pack_ids([1, 2, last]), SamplingParams(max_tokens=4), FrontId("f")
        )
        scheduler.add(request, Attempt(1), b"", 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None and all(seq.life.phase is Phase.PREFILLING for seq in batch.rows)
    return batch


def test_a_step_that_does_not_raise_runs_once() -> None:
    runner = PoisonableRunner()
    rows, failed = run_isolating(runner, step_of(10, 20))
    assert [row.ids for row in rows] == [(11,), (21,)] and failed == {} and runner.runs == [2]


def test_the_guilty_row_is_named_and_the_others_go_on() -> None:
    runner = PoisonableRunner()
    rows, failed = run_isolating(runner, step_of(10, POISON, 30))
    assert [row.ids for row in rows] == [(11,), (), (31,)]
    assert [[one.chosen for one in row.prompt_logprobs] for row in rows] == [[-10.0], [], [-30.0]]
    assert list(failed) == [1] and "RuntimeError" in failed[1]
    assert runner.runs == [3, 1, 1, 1]


def test_a_row_that_overflows_is_named_without_running_anything_again() -> None:
    runner = PoisonableRunner()
    rows, failed = run_isolating(runner, step_of(10, OVERFLOW))
    assert [row.ids for row in rows] == [(11,), ()] and failed == {1: "overflow"} and runner.runs == [2]


def test_an_overflow_beside_a_poisoned_row_is_found_too() -> None:
    rows, failed = run_isolating(PoisonableRunner(), step_of(POISON, OVERFLOW, 30))
    assert [row.ids for row in rows] == [(), (), (31,)] and sorted(failed) == [0, 1]


def test_a_step_has_as_many_tokens_as_asked_or_as_suit_the_device() -> None:
    runner = PoisonableRunner()
    runner.cache = PagedCache(CacheLayout(1, 1, 16, 16, torch.float32), 1)
    asked = WorkerSettings(coordinator="tcp://127.0.0.1:1", max_num_batched_tokens=77)
    unasked = WorkerSettings(coordinator="tcp://127.0.0.1:1")
    assert tokens_of_a_step(asked, runner) == 77
    assert tokens_of_a_step(unasked, runner) == CPU_STEP_TOKENS
