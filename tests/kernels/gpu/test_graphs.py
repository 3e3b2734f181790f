"""Decode steps by batch size: which size, what the buffers hold, and that padding changes no bit. What a graph would
replay is run again over the same buffers here: a CPU has no graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu_check.driving import Sampling
from kernels.cache import PagedCache
from kernels.device import OnGpu
from kernels.gpu.graphs import MAX_GRAPH_ROWS, Again, Captured, DecodeGraphs, graph_sizes
from kernels.gpu.steps import DeviceSteps
from kernels.runner import ModelRunner, load_runner
from kernels.step import StepLayout
from tests.kernels.driving import generate, random_prompts
from tests.kernels.gpu.grid import device_step, scattered_tables
from tests.kernels.steps import make_step
from tests.kernels.tiny_models import save_model

BLOCK = 4
SLOTS = 11
WIDTH = 8


def test_sizes_are_few_and_hold_every_batch() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert graph_sizes(4096)[-1] == MAX_GRAPH_ROWS
    for most in range(1, 70):
        sizes = graph_sizes(most)
        assert sorted(set(sizes)) == list(sizes) and sizes[-1] == most
        graphs = DecodeGraphs(lambda size: torch.zeros(size), most, Again)
        for rows in range(1, most + 1):
            size = graphs.size_for(rows)
            assert size is not None and rows <= size < rows + 8
        assert graphs.size_for(most + 1) is None


class Toy:
    """A paged model of one number a token: each token's state is the sum of what its row has, weighed by position.
    Reads nothing but the device's arrays, as kernels do."""

    def __init__(self) -> None:
        self.pool = torch.full((40, BLOCK), float("nan"), dtype=torch.float64)
        self.sizes: list[int] = []

    def __call__(self, token_ids: torch.Tensor, step: StepLayout) -> torch.Tensor:
        there = step.on_device
        self.sizes.append(there.num_rows)
        hidden = torch.full((there.num_tokens, 1), float("nan"), dtype=torch.float64)
        for place in range(there.num_tokens):  # all are written before any is read
            position, row = int(there.positions[place]), int(there.token_rows[place])
            if position >= 0:
                block = int(there.tables[row, position // BLOCK])
                self.pool[block, position % BLOCK] = float(token_ids[place])
        for place in range(there.num_tokens):
            position, row = int(there.positions[place]), int(there.token_rows[place])
            if position >= 0:
                assert position < there.max_end
                assert int(there.starts[row]) <= position < int(there.starts[row] + there.counts[row])
                past = self.pool[there.tables[row, : position // BLOCK + 1].long()].view(-1)[: position + 1]
                hidden[place] = (past * torch.arange(1, position + 2, dtype=torch.float64)).sum()
        return hidden


def expected(tokens: list[int]) -> float:
    return float(sum(place * token for place, token in enumerate(tokens, start=1)))


def make(
    capture: Callable[[Callable[[], torch.Tensor]], Captured] | None,
) -> tuple[DeviceSteps, Toy, np.ndarray]:
    toy = Toy()
    tables = np.zeros((SLOTS, WIDTH), dtype=np.int32)
    steps = DeviceSteps(
        toy,
        tables,
        block_size=BLOCK,
        max_step_tokens=64,
        max_model_len=BLOCK * WIDTH,
        device=torch.device("cpu"),
        capture=capture,
    )
    return steps, toy, tables


def run_all(steps: DeviceSteps, tables: np.ndarray, decode_steps: int) -> list[list[float]]:
    """Rows of unlike lengths: a chunk of each, then decode steps of fewer and fewer of them. What each step gave."""
    tokens = [[10 * slot + n for n in range(1 + slot % 5)] for slot in range(SLOTS)]
    free = list(np.random.default_rng(1).permutation(40))
    held = [0] * SLOTS
    gave: list[list[float]] = []

    def run(slots: list[int], computed: list[int]) -> None:
        for slot in slots:
            needed = -(-len(tokens[slot]) // BLOCK)
            while held[slot] < needed:
                tables[slot, held[slot]] = free.pop()
                steps.blocks_changed(slot, held[slot], 1)
                held[slot] += 1
        starts = np.array([computed[slot] for slot in slots], dtype=np.int32)
        counts = np.array([len(tokens[slot]) for slot in slots], dtype=np.int32) - starts
        step = StepLayout(starts, counts, np.array(slots), tables, BLOCK, torch.device("cpu"))
        ids = np.concatenate([tokens[slot][computed[slot] :] for slot in slots])
        sampling = slots[:: 1 + len(gave) % 2]  # now and then a row of one token does not sample
        lasts = (np.cumsum(counts) - 1)[:: 1 + len(gave) % 2]
        hidden, of_rows = steps.run(ids, step, lasts)
        assert len(hidden) == len(ids) and torch.equal(hidden[lasts], of_rows)
        gave.append(of_rows[:, 0].tolist())
        assert gave[-1] == [expected(tokens[slot]) for slot in sampling]
        for slot in slots:
            computed[slot] = len(tokens[slot])
            tokens[slot].append(1000 + slot)

    computed = [0] * SLOTS
    run(list(range(SLOTS)), computed)
    for number in range(decode_steps):
        run(list(range(number % 3, SLOTS - number)), computed)
    return gave


def test_graphs_give_what_single_launches_give() -> None:
    eager, _, eager_tables = make(None)
    graphed, toy, tables = make(Again)
    graphed.capture_all()
    assert torch.isnan(toy.pool).all(), "rows that pad write nothing"
    captured = list(toy.sizes)
    assert sorted(set(captured)) == list(graph_sizes(SLOTS))
    assert run_all(graphed, tables, 9) == run_all(eager, eager_tables, 9)
    assert set(toy.sizes[len(captured) :]) - set(graph_sizes(SLOTS)) == set()
    assert len(set(toy.sizes[len(captured) + 1 :])) > 3, "batches of several sizes were met"


def test_chunks_are_warmed_before_serving_and_leave_no_trace_in_what_follows() -> None:
    plain, _, plain_tables = make(None)
    warm, toy, tables = make(Again)
    warm.warm_chunks()
    assert toy.sizes == [2], "one step of two rows"
    assert toy.pool[0, 0].isfinite() and toy.pool[1:].isnan().all(), "nothing but block 0 was written"
    assert run_all(warm, tables, 5) == run_all(plain, plain_tables, 5)


def test_a_graph_is_captured_when_first_met_and_once() -> None:
    captured: list[int] = []

    def capture(step: Callable[[], torch.Tensor]) -> Captured:
        again = Again(step)
        captured.append(len(again.output))
        return again

    steps, _, tables = make(capture)
    run_all(steps, tables, 9)
    assert len(captured) == len(set(captured)) > 3 and set(captured) <= set(graph_sizes(SLOTS))


def test_where_capture_fails_steps_run_all_the_same_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuses(step: Callable[[], torch.Tensor]) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    steps, _, tables = make(refuses)
    plain, _, plain_tables = make(None)
    steps.capture_all()
    assert run_all(steps, tables, 5) == run_all(plain, plain_tables, 5)
    said = [record.message for record in caplog.records if "without CUDA graphs" in record.message]
    assert len(said) == 1 and "not permitted" in said[0]


def test_a_runner_gives_the_same_through_device_steps(tmp_path: Path) -> None:
    """Kernel by kernel: torch's own kernels look at arrays on the host, which no graph can."""
    save_model("qwen3-qk-norm", tmp_path)
    plain = load_runner(str(tmp_path), device="cpu", num_blocks=200, max_num_seqs=8, block_size=4)
    on_device = ModelRunner(
        plain.model,
        PagedCache(plain.layout, 200),
        8,
        plain.max_model_len,
        1,
        "",
        gpu=OnGpu(step_tokens=16, eager=True),
    )
    prompts = random_prompts([1, 5, 17, 30, 44], plain.vocab_size)
    sampling = Sampling(logprobs=2, temperature=0.8, prompt_logprobs=1)
    for chunk in (7, 300):
        wanted = generate(plain, prompts, 6, chunk=chunk, sampling=sampling, stagger=2)
        assert generate(on_device, prompts, 6, chunk=chunk, sampling=sampling, stagger=2) == wanted


def test_a_layout_of_a_step_brings_itself_to_the_device() -> None:
    tables = scattered_tables([9, 30, 17], 8, 20)
    step = make_step([(8, 1), (20, 10), (0, 17)], tables.tolist(), 8)
    wanted, found = device_step([8, 20, 0], [1, 10, 17], tables), step.on_device
    for name in ("tables", "starts", "counts", "firsts", "token_rows", "positions", "max_count", "max_end"):
        left, right = getattr(found, name), getattr(wanted, name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, name
