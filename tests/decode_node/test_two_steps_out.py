"""A decode worker with two steps out over a real model: the answers of one step at a time, whatever happens amid.

The model runs on the Triton path, in the interpreter, which computes at once; what comes down from it is late all the
same (`LateDevice`). The pure worker, the model thread and the runner are those of a worker process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.batching import Batch, BatchingCore
from common.blocks import BlockPool
from common.effects import Effect, ToCoordinator, ToFront
from common.messages import Decode, Ended, Tokens
from common.ordering import Fair
from common.request import (
    Attempt,
    FrontId,
    Grammar,
    Key,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    WorkerId,
    pack_ids,
)
from common.worker_settings import WorkerSettings
from decode_node.engine import _make_worker
from decode_node.forming import Continuous
from decode_node.worker import DecodeWorker
from kernels.device import OnGpu
from kernels.runner import ModelRunner, load_runner
from tests.fuzz.scenes import FRONT, HonestCoordinator
from tests.kernels.driving import fill_with_nan, random_prompts
from tests.kernels.gpu.late_device import LateDevice
from tests.kernels.tiny_models import save_model
from tests.transfer.channel_ends import until
from transfer import worker_process
from transfer.isolating import ComingStep, IsolatingSteps
from transfer.receiver import TransferReceiver
from transfer.segment import PoolSegment
from transfer.stepping import Stepping

BLOCK = 4
LIMIT_S = 60.0
END = 256
VOCAB = 258
COORDINATOR = WorkerId("coordinator")


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[str, str] = ("", "")


class Machine:
    """Launches on a runner and counts; may be told to raise over the rows of one request."""

    def __init__(self, runner: ModelRunner) -> None:
        self._launch = runner.launch
        self.out = self.most_out = self.rows = self.raised = 0
        self.raises: Callable[[Batch], bool] = lambda batch: False
        self.late = False
        self.launched: Callable[[], None] = lambda: None

    def launch(self, batch: Batch) -> ComingStep:
        self.rows += len(batch.rows)
        self.launched()
        raises = self.raises(batch)
        self.raised += raises
        machine, coming = self, self._launch(batch)  # which takes up first what changes in its slots
        if raises and not self.late:
            coming.discard()
            raise RuntimeError("a fault of ours")
        self.out += 1
        self.most_out = max(self.most_out, self.out)

        class Coming:
            def result(self) -> Any:
                machine.out -= 1
                if raises:
                    coming.discard()
                    raise RuntimeError("a fault of ours")
                return coming.result()

            def discard(self) -> None:
                machine.out -= 1
                coming.discard()

        return Coming()


class Scene:
    """Its loop is the test."""

    def __init__(self, runner: ModelRunner, max_inflight: int, num_blocks: int = 64) -> None:
        fill_with_nan(runner)
        self.pool = BlockPool(num_blocks)
        core = BatchingCore(
            self.pool,
            block_size=BLOCK,
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=32,
            prefix_caching=True,
            fingerprint="f",
        )
        self.node = DecodeWorker(
            core,
            TransferReceiver(block_bytes=100),
            fingerprint="f",
            block_bytes=100,
            max_inflight=max_inflight,
        )
        self.machine = Machine(runner)
        steps = IsolatingSteps(self.machine)
        launch = steps.launch if max_inflight > 1 else None
        self.stepping = Stepping(self.node, steps.run, lambda: None, launch)
        self.answers: dict[str, Answer] = {}

    def play(self, asked: dict[str, Request]) -> dict[str, Answer]:
        """All at once, until all have ended and nothing is held."""
        self.answers = {name: Answer() for name in asked}
        with self.stepping.lock:
            for request in asked.values():
                self.node.handle(Decode(request.request_id, Attempt(1), request, b""), COORDINATOR, 0.0)
            self.stepping.begin(time.monotonic())
        until = time.monotonic() + LIMIT_S
        while not (self.node.idle and self.stepping.started is None):
            assert time.monotonic() < until and self.stepping.broken is None
            self._hear()
            time.sleep(0.001)
        self._hear()
        self.stepping.end()
        self.pool.check()
        assert self.pool.held == 0 and self.machine.out == 0
        return self.answers

    def _hear(self) -> None:
        with self.stepping.lock:
            self._take(self.stepping.take_said() + self.node.turn(time.monotonic()))

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToCoordinator(Ended() as ended):
                    self.answers[ended.id].end = (ended.outcome, ended.reason)
                case ToFront(_, Tokens() as tokens):
                    for row in tokens.rows:
                        answer = self.answers[row.id]
                        assert row.first == len(answer.ids), "each token once, in order"
                        answer.ids += row.ids
                        answer.logprobs += row.logprobs or ()


def byte_tokenizer(folder: Path) -> None:
    """A token for each byte, for a grammar to be held to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<pad>"])
    assert made.token_to_id("<end>") == END
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("model")
    save_model("qwen3-qk-norm", target, num_hidden_layers=1, vocab_size=VOCAB, eos_token_id=END)
    byte_tokenizer(target)
    return target


def load(folder: Path, backend: str) -> ModelRunner:
    return load_runner(
        str(folder), dtype="float32", device="cpu", block_size=BLOCK, num_blocks=64, max_num_seqs=8,
        max_model_len=32, backend=backend, gpu=OnGpu(step_tokens=64, eager=True),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def triton(folder: Path) -> ModelRunner:
    made = load(folder, "triton")
    assert made.runs_ahead
    return made


PROMPTS = random_prompts([3, 1, 1, 1, 1, 1, 2], VOCAB)


def ask(name: str, prompt: list[int], **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **sampling})
    return Request(RequestId(name), pack_ids(prompt), params, FrontId("f"))


def all_kinds(stop: int) -> dict[str, Request]:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "stops": {"end_token_ids": (stop,)},
        "drawn": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        "penal": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "temperature": 1.0},
        "held": {"grammar": Grammar("regex", "[ab]{3}c+"), "end_token_ids": (END,)},
        "told": {"logprobs": 2, "temperature": 0.7, "seed": 2},
        "scored": {"prompt_logprobs": 1},
    }
    prompts = dict(zip(kinds, PROMPTS, strict=True)) | {"stops": PROMPTS[0]}
    return {name: ask(name, prompts[name], **sampling) for name, sampling in kinds.items()}


@pytest.fixture(scope="module")
def asked(folder: Path) -> dict[str, Request]:
    """ "stops" is "greedy", until what that says third (or the first after it that it had not said)."""
    greedy = ask("greedy", PROMPTS[0])
    said = Scene(load(folder, "native"), 1).play({"greedy": greedy})["greedy"].ids
    return all_kinds(next(token for at, token in enumerate(said) if at >= 2 and token not in said[:at]))


@pytest.fixture(scope="module")
def wanted(folder: Path, asked: dict[str, Request]) -> dict[str, Answer]:
    """The CPU path's, one step at a time."""
    answers = Scene(load(folder, "native"), 1).play(asked)
    assert all(answer.end[0] == "finished" for answer in answers.values()), answers
    assert answers["stops"].end[1] == "stop" and 3 <= len(answers["stops"].ids) < 5
    assert len(answers["told"].logprobs) == 5
    return answers


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    device = LateDevice(monkeypatch)
    yield device
    assert not device.coming


def same(found: dict[str, Answer], wanted: dict[str, Answer], *but: str) -> None:
    for name, answer in wanted.items():
        if name not in but:
            assert (found[name].ids, found[name].end) == (answer.ids, answer.end), name
            assert len(found[name].logprobs) == len(answer.logprobs)


def test_answers_are_those_of_one_step_at_a_time(
    triton: ModelRunner, asked: dict[str, Request], wanted: dict[str, Answer], late: LateDevice
) -> None:
    scene = Scene(triton, 2)
    found = scene.play(asked)
    same(found, wanted)
    assert scene.machine.most_out == 2
    tokens = sum(len(answer.ids) for answer in found.values())
    assert scene.machine.rows == tokens + 1, "one row was launched too far: that of the answer that stopped"


def test_where_blocks_run_out_and_a_client_leaves(
    folder: Path, triton: ModelRunner, late: LateDevice
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"temperature": 0.9, "seed": 5},
        "told": {"logprobs": 0},
        "biased": {"logit_bias": ((7, 1.0),)},
    }
    prompts = dict(zip(kinds, PROMPTS, strict=False))
    asked = {name: ask(name, prompts[name], max_tokens=9, **sampling) for name, sampling in kinds.items()}
    wanted = Scene(load(folder, "native"), 1).play(asked)
    scene = Scene(triton, 2, num_blocks=7)
    key: Key = (RequestId("drawn"), Attempt(1))

    def leaves() -> None:
        """While a step is out, from the model thread, as the loop would in its place."""
        if len(scene.answers["drawn"].ids) >= 2 and scene.machine.out == 1 and key in scene.node.live_keys():
            with scene.stepping.lock:
                scene.stepping._said += scene.node.abort(key, "the client left", time.monotonic())

    scene.machine.launched = leaves
    found = scene.play(asked)
    same(found, wanted, "drawn")
    assert found["drawn"].end == ("aborted", "the client left")
    assert found["drawn"].ids == wanted["drawn"].ids[: len(found["drawn"].ids)]
    assert scene.node.records.counters.total("num_preemptions_total") > 0


@pytest.mark.parametrize(("late_fault", "for_ever"), [(False, True), (True, False)])
def test_over_one_row_its_neighbours_go_on(
    triton: ModelRunner,
    asked: dict[str, Request],
    wanted: dict[str, Answer],
    late: LateDevice,
    late_fault: bool,
    for_ever: bool,
) -> None:
    """From its third token on. Once: its row alone gives what the whole step would have given."""
    scene = Scene(triton, 2)
    machine = scene.machine
    machine.late = late_fault

    def raises(batch: Batch) -> bool:
        mine = [seq for seq in batch.rows if seq.key[0] == "greedy" and seq.num_outputs >= 2]
        return bool(mine) and (for_ever or not machine.raised)

    machine.raises = raises
    chosen = {name: asked[name] for name in ("greedy", "penal", "told")}
    found = scene.play(chosen)
    same(found, {name: wanted[name] for name in chosen}, *(("greedy",) if for_ever else ()))
    assert machine.raised > 0 and machine.most_out == 2
    if for_ever:
        assert found["greedy"].end[0] == "failed" and found["greedy"].ids == wanted["greedy"].ids[:3]


@pytest.mark.parametrize("backend", ["triton", "native"])
def test_a_worker_process_has_two_steps_out_on_a_device_and_one_on_a_cpu(
    backend: str,
    folder: Path,
    asked: dict[str, Request],
    wanted: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the process but its loading, with its sockets, until a signal."""
    runner = load(folder, backend)
    machine = Machine(runner)
    monkeypatch.setattr(runner, "launch", machine.launch)
    monkeypatch.setattr(worker_process, "keep_out_of_collections", lambda: None)
    make = partial(_make_worker, Continuous(), Fair())

    async def serve() -> dict[Key, list[int]]:
        coordinator = HonestCoordinator()
        coordinator.wants_all = True
        settings = WorkerSettings(coordinator=coordinator.endpoint)
        serving = asyncio.create_task(
            worker_process._serve(settings, "decode", runner, folder, PoolSegment(), 1, make, None, ())
        )
        await until(lambda: coordinator.load is not None, 20)
        for name in ("greedy", "told"):
            request = replace(asked[name], front=FRONT)
            message = Decode(request.request_id, Attempt(1), request, b"")
            coordinator.say(coordinator.registered[0], message)
        await until(lambda: len(coordinator.ended) == 2, LIMIT_S)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 20) == 0
        coordinator.close()
        return coordinator.tokens

    tokens = asyncio.run(serve())
    assert {key[0]: ids for key, ids in tokens.items()} == {n: wanted[n].ids for n in ("greedy", "told")}
    assert machine.most_out == (2 if backend == "triton" else 1)
