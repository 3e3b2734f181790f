"""Steps launched while the one before is out: the tokens of one at a time, however late the device is; what may not be
known yet is refused; and what came to nothing makes no token of the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check.driving import Batch, Joined, Sampling
from common.lifecycle import Phase
from common.request import Attempt, FrontId, Grammar, Request, RequestId, SamplingParams, pack_ids
from common.sequence import Sequence, may_go_ahead
from kernels.device import OnGpu
from kernels.launched import NO_TOKEN_BEFORE, NOT_FINITE, LaunchedStep
from kernels.runner import ModelRunner, load_runner
from kernels.step import StepResult, TokenLogprob
from tests.kernels.driving import fill_with_nan, generate, random_prompts
from tests.kernels.gpu.late_device import LateDevice
from tests.kernels.tiny_models import save_model

BLOCK = 4
SLOTS = 4
SETTINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=9, top_p=0.9),
    Sampling(temperature=0.8, seed=3, top_k=7, logit_bias=((7, 3.0),), logprobs=2),
)
PROMPTS = random_prompts([1, 1, 1], 211)  # chunks take five times as long as decode rows here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("model")
    save_model("qwen3-qk-norm", target, num_hidden_layers=1)
    return target


def load(folder: Path, backend: str = "triton", *, eager: bool = False) -> ModelRunner:
    made = load_runner(
        str(folder), dtype="float32", device="cpu", block_size=BLOCK, num_blocks=12, max_num_seqs=SLOTS,
        max_model_len=12, backend=backend, gpu=OnGpu(step_tokens=64, eager=eager),  # type: ignore[arg-type]
    )  # fmt: skip
    fill_with_nan(made)
    return made


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load(folder)


Said = list[tuple[int, TokenLogprob | None]]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Said]:
    """The CPU path's, one step at a time."""
    return generate(load(folder, "native"), PROMPTS, 6, sampling=SETTINGS)


def prefill(runner: ModelRunner, settings: tuple[Sampling, ...] = SETTINGS) -> list[Said]:
    """All prompts in slots 0 and on, with room to the end; what each says first."""
    fill_with_nan(runner)
    batch = Batch()
    for slot, (prompt, sampling) in enumerate(zip(PROMPTS, settings, strict=False)):
        blocks = range(3 * slot, 3 * slot + 3)
        batch.joined.append(Joined(slot, prompt, len(prompt), blocks, sampling))
        batch.add(slot, 0, prompt, True)
    said: list[Said] = [[] for _ in batch.slots]
    take(runner.run(batch), batch.slots, said)
    return said


def take(result: StepResult, slots: list[int], said: list[Said]) -> None:
    assert not result.faults, result.faults
    for slot, ids, logprobs in zip(slots, result.ids, result.logprobs, strict=True):
        said[slot].append((ids[0], None if logprobs is None else logprobs[0]))


def next_of(slots: list[int], said: list[Said], before: Batch | None) -> Batch:
    """A decode step of `slots`: where `before` is out, what its rows are about to say."""
    batch = Batch()
    for slot in slots:
        out = 0 if before is None or slot not in before.slots else 1
        newest = -1 - before.slots.index(slot) if before is not None and out else said[slot][-1][0]
        batch.add(slot, len(PROMPTS[slot]) + len(said[slot]) - 1 + out, [newest], True)
    return batch


def ahead(runner: ModelRunner, rows_of: Callable[[int], list[int]], steps: int) -> list[Said]:
    """Two steps out, always; step n has the slots `rows_of(n)`, in that order."""
    said = prefill(runner)
    before: tuple[Batch, LaunchedStep] | None = None
    for number in range(steps):
        batch = next_of(rows_of(number), said, before and before[0])
        coming = runner.launch(batch)
        if before is not None:
            take(before[1].result(), before[0].slots, said)
        before = batch, coming
    assert before is not None
    take(before[1].result(), before[0].slots, said)
    runner.run(Batch(left=[0, 1, 2]))
    return said


def test_two_steps_out_say_what_one_says_and_the_cpu_path(
    runner: ModelRunner, wanted: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(monkeypatch)
    said = ahead(runner, lambda number: [[0, 1, 2], [2, 1, 0]][number % 2], 5)
    for ours, theirs in zip(said, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [one is not None for _, one in said[2]] == [True] * 6
    assert not device.coming and device.waits == 7


def test_rows_come_and_go_and_take_the_token_that_is_theirs(folder: Path, wanted: list[Said]) -> None:
    """Without graphs. Who pauses a step is known to the host by then."""
    runner = load(folder, eager=True)
    said = ahead(runner, lambda number: [[1], [0, 1, 2], [2, 0], [1, 2], [0], [2]][number], 6)
    for ours, theirs in zip(said, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs][: len(ours)]
    assert [len(one) for one in said] == [4, 4, 5]


def test_a_chunk_beside_decode_rows_gives_their_tokens_on(runner: ModelRunner, wanted: list[Said]) -> None:
    """Not every row of a batch draws: which token is whose is told by the row, not by the draw."""
    said = prefill(runner, SETTINGS[:2])
    first = Batch(joined=[Joined(2, [5, 6, 7], 3, [6], Sampling())])
    first.add(0, 1, [said[0][0][0]], True)
    first.add(2, 0, [5, 6], False)
    first.add(1, 1, [said[1][0][0]], True)
    one = runner.launch(first)
    second = Batch()
    second.add(1, 2, [-3], True)
    two = runner.launch(second)
    assert one.result().ids == ((wanted[0][1][0],), (), (wanted[1][1][0],))
    assert two.result().ids == ((wanted[1][2][0],),)


# ---------------------------------------------------------------- who may go ahead

CHANGES: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": ((3, 1.0),),
    "seed": 4,
    "child": 2,
    "min_tokens": 9,
    "end_token_ids": (5,),
    "logprobs": 1,
    "prompt_logprobs": 0,
    "grammar": Grammar("regex", "a"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_scheduler_sends_ahead_what_the_runner_takes(runner: ModelRunner, name: str) -> None:
    """What neither of them knows is a new field of the parameters: it is to be listed here."""
    assert {*SamplingParams.__dataclass_fields__} == {*CHANGES, "max_tokens"}
    asked = replace(SamplingParams(max_tokens=9, temperature=0.0), **{name: CHANGES[name]})
    request = Request(RequestId("r"), pack_ids([5, 6, 7]), asked, FrontId("f"))
    expected = may_go_ahead(Sequence(request, Attempt(1), b"", 1, Phase.QUEUED, 0.0))
    first, second = Batch(joined=[Joined(0, [5], 1, [0], asked)]), Batch()  # type: ignore[arg-type]
    first.add(0, 0, [5], True)
    second.add(0, 1, [-1], True)
    runner.launch(first)
    if expected:
        runner.launch(second)
    else:
        with pytest.raises(AssertionError, match="before the host sees its newest token"):
            runner.launch(second)
    assert expected == (not name.endswith("penalty") and name != "grammar")


def test_a_batch_that_follows_nothing_is_refused(runner: ModelRunner, folder: Path) -> None:
    follows = Batch()
    follows.add(1, len(PROMPTS[1]), [-2], True)
    for row in (
        (1, len(PROMPTS[1]) + 1, [-2], True),  # the one before has no second row
        (0, len(PROMPTS[1]) + 1, [-1], True),  # its first row is another's
        (1, len(PROMPTS[1]) + 2, [-1], True),  # and a token is missing
    ):
        wrong = Batch()
        wrong.add(*row)
        prefill(runner)
        runner.launch(follows)
        with pytest.raises((AssertionError, IndexError)):
            runner.launch(wrong)
    host = load(folder, "native")
    prefill(host)
    with pytest.raises(AssertionError, match="no step before"):
        host.launch(follows)
    assert runner.runs_ahead and not host.runs_ahead


# ---------------------------------------------------------------- steps that come to nothing


def test_a_row_without_a_token_makes_none_of_the_next_step(runner: ModelRunner, wanted: list[Said]) -> None:
    said = prefill(runner)
    runner.cache.tensor[0].fill_(float("nan"))
    first = next_of([0, 1], said, None)
    one = runner.launch(first)
    runner.cache.tensor[0].fill_(0.0)  # so that the next step finds nothing wrong by itself
    two = runner.launch(next_of([0, 1], said, first))
    assert dict(one.result().faults) == {0: NOT_FINITE}
    assert dict(two.result().faults) == {0: NO_TOKEN_BEFORE} and two.result().ids[0] == ()
    assert [one.result().ids[1][0], two.result().ids[1][0]] == [token for token, _ in wanted[1][1:3]]


def test_a_step_without_a_result_makes_no_tokens_of_the_next(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = prefill(runner)
    first = next_of([2, 1], said, None)
    one = runner.launch(first)
    second = next_of([1], said, first)
    second.add(0, len(PROMPTS[0]), [said[0][0][0]], True)
    two = runner.launch(second)

    def bad(*_: object) -> Any:
        raise RuntimeError("over its log-probabilities")

    with monkeypatch.context() as broken:
        broken.setattr(runner._sampler._host, "score", bad)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            one.result()
    result = two.result()
    assert dict(result.faults) == {0: NO_TOKEN_BEFORE}
    assert result.ids[0] == () and len(result.ids[1]) == 1, "who did not follow it is not touched"


def test_a_launch_that_raises_leaves_nothing_running(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = prefill(runner)
    device = LateDevice(monkeypatch)
    one = runner.launch(next_of([0, 2], said, None))
    waits = device.waits
    bad = next_of([1], said, None)
    bad.starts[0] += 500
    with pytest.raises(AssertionError):
        runner.launch(bad)
    assert device.waits == waits + 1 and not device.coming
    assert one.result().ids[0] != ()
