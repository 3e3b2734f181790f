"""The GPU check on a CPU: all of it runs in the interpreter, and what is wrong is seen and ends it with 1."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.gpu_check import attention, block_moves, paths, sampling, small
from bench.gpu_check.__main__ import NO_GPU, main
from bench.gpu_check.driving import Asked
from bench.gpu_check.findings import Check, Findings, Skipped
from bench.gpu_check.paths import STORIES
from bench.gpu_check.places import LLAMA_8B, MODELS, cpu_place
from bench.gpu_check.tune import Tried, search, write_tuning
from bench.gpu_check.weights import STEP_TOKENS
from kernels.gpu.block_moves import gather_blocks
from kernels.gpu.tuning import Launch, read_tuning
from kernels.model_config import ModelConfig
from kernels.weights import expected_tensors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the whole script, tuning too, as a person starts it."""
    folder = tmp_path_factory.mktemp("check")
    out = folder / "new" / "check.json"
    flags = ["--cpu", "--tune", "--out", str(out), "--tuning-file", str(folder / "tuning.json")]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bench/gpu_check.sh", *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0, ended.stderr
    assert "checks right" in ended.stdout and "interpreter, not a speed" in ended.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_kernel_is_checked_and_timed(result: dict[str, Any]) -> None:
    kernels = {"attention", "norms", "silu_mul", "rope_store", "block_moves", "sampling"}
    assert result["all_right"] and all(check["right"] for check in result["checks"])
    assert kernels < {check["part"] for check in result["checks"]}
    assert kernels < {speed["part"] for speed in result["speeds"]}
    assert result["speeds_are"] == "interpreter, not a speed"
    assert all(speed["seconds"] > 0 and speed["rate"] > 0 for speed in result["speeds"])


def test_tokens_are_compared_over_every_path(result: dict[str, Any]) -> None:
    checks = {(check["part"], check["what"]) for check in result["checks"]}
    for what in ("copied in one launch", "chunks of 4 tokens", "eager", "prompt of 9 tokens, alone"):
        assert ("tiny model", f"{what}: tokens that are others") in checks
    for channel in ("tcp", "shm"):
        assert (f"tiny model over {channel}", "tokens that are others") in checks
    assert [one["part"] for one in result["not_run"]] == ["tiny model over ipc"]  # of a GPU's pool alone


def test_steps_are_timed_as_graphs_and_eager(result: dict[str, Any]) -> None:
    steps = [speed for speed in result["speeds"] if "decode step" in speed["what"]]
    assert [speed["what"].rpartition(", ")[2] for speed in steps] == ["eager"] * 2 + ["graph"] * 2
    assert all("eager takes" in speed["note"] for speed in steps[2:])
    assert any("chunk step" in speed["what"] for speed in result["speeds"])
    assert any("times as fast as the invariant form" in speed["note"] for speed in result["speeds"])
    assert any(noted["part"] == "tune" for noted in result["noted"])


WITHOUT = """
import sys

class Without:
    def __init__(self, finders, names):
        self.finders, self.names = finders, names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)

sys.meta_path[:] = [Without(sys.meta_path[:], set(sys.argv.pop(1).split(",")))]
from bench.gpu_check.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_with_little_more_than_torch_is_enough(tmp_path: Path) -> None:
    """What the GPU machine of setup-facts.md lacks is missing here; channels need it, and say so."""
    missing = "pydantic,zmq,llguidance,uvloop,fastapi,uvicorn,gguf,transformers"
    flags = [
        "--cpu",
        "--parts",
        "block_moves",
        "channels",
        "--checks-only",
        "--out",
        str(tmp_path / "c.json"),
    ]
    command = [sys.executable, "-c", WITHOUT, missing, *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no package pydantic and zmq here" in ended.stdout


def test_the_large_model_has_the_shape_of_an_8b() -> None:
    """It is made on a GPU alone."""
    shapes = expected_tensors(ModelConfig.from_dict(LLAMA_8B)).values()
    assert sum(math.prod(shape) for shape in shapes) == 8_030_261_248
    assert all(
        max(story.lengths) + story.wanted < MODELS[name]["max_position_embeddings"]
        for name, story in STORIES.items()
    )
    assert all(max(story.chunk, *story.others) <= STEP_TOKENS for story in STORIES.values())


# ---------------------------------------------------------------- what is wrong is seen

Broken = Callable[[Callable[..., Any]], Callable[..., Any]]


def slightly_off(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: real(*given) * 1.001


def by_company(real: Callable[..., Any]) -> Callable[..., Any]:
    """A row's numbers depend on how many rows there are."""
    return lambda *given: real(*given) * (1 + 1e-6 * len(given[0]))


def last_left_out(real: Callable[..., Any]) -> Callable[..., Any]:
    """The last number of a row is not written."""

    def broken(*given: Any) -> Any:
        out = real(*given)
        out[:, -1] = torch.nan
        return out

    return broken


def first_block_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def broken(source: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor) -> Any:
        wrong = blocks.clone()
        wrong[1] = blocks[0]
        return real(source, wrong, target)

    return broken


def next_id(real: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*given: Any, **named: Any) -> Any:
        out = real(*given, **named)
        out[0] += 1
        return out

    return broken


def other_sharpness(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, *given, **named: real(q * 1.0001, *given, **named)


@pytest.mark.parametrize(
    ("module", "name", "broken", "part", "what"),
    [
        (small, "silu_mul", slightly_off, "silu_mul", "error"),
        (small, "silu_mul", by_company, "silu_mul", "numbers that are others alone"),
        (small, "rms_norm", last_left_out, "norms", "norm: error"),
        (small, "add_rms_norm", slightly_off, "norms", "added: error"),
        (small, "rope_store", slightly_off, "rope_store", "queries: error over a row's mean"),
        (block_moves, "gather_blocks", first_block_twice, "block_moves", "gather, 1000 bytes: bytes that are others"),
        (sampling, "sample_on_device", next_id, "sampling", "24 rows of 211: ids that are not numpy's"),
        (
            attention,
            "paged_attention",
            other_sharpness,
            "attention",
            "chunks, 4/2 heads of 64, blocks of 16: error over a row's mean",
        ),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_seen(
    module: ModuleType, name: str, broken: Broken, part: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    checks: list[Check] = []
    for check in module.checks(cpu_place()):
        checks.append(check)
        if (check.part, check.what) == (part, what):
            break
    assert (part, what) in {(check.part, check.what) for check in checks if not check.right}


def test_a_wrong_kernel_ends_the_script_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # given back afterwards
    flags = ["--cpu", "--parts", "block_moves", "--checks-only", "--out", str(tmp_path / "check.json")]
    assert main(flags) == 0
    monkeypatch.setattr(block_moves, "gather_blocks", first_block_twice(gather_blocks))
    assert main(flags) == 1
    assert "WRONG: block_moves: gather" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["all_right"] is False


def test_a_block_that_was_not_moved_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = paths.move

    def lazy(source: Any, first: Any, target: Any, second: Any, asked: Any, *, copied: bool) -> None:
        asked = Asked([asked.prompts[0], []], asked.settings, asked.wanted)
        real(source, first, target, second, asked, copied=copied)

    monkeypatch.setattr(paths, "move", lazy)
    found = Findings(print, limit_s=60)
    found.run("paths", lambda: paths.checks(paths.Pools("tiny", cpu_place())))
    assert not found.all_right
    assert "not finite" in found.checks[-1].why


# ---------------------------------------------------------------- how a run goes


def test_a_part_that_raises_is_wrong_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = Findings(print, limit_s=60)

    def raises() -> list[Check]:
        raise RuntimeError("illegal memory access\nand more")

    found.run("one", raises)
    found.run("two", lambda: [Check("two", "fine", 0, 0)])
    assert [(check.part, check.right, check.why) for check in found.checks] == [
        ("one", False, "RuntimeError: illegal memory access"),
        ("two", True, ""),
    ]
    assert not found.all_right
    assert "WRONG  one" in capsys.readouterr().out


def test_no_part_begins_after_the_limit_and_nothing_checked_is_not_right() -> None:
    found = Findings(print, limit_s=-1)
    found.run("one", lambda: [Check("one", "fine", 0, 0)])
    assert (
        found.checks == []
        and isinstance(found.skipped[0], Skipped)
        and "no time left" in found.skipped[0].why
    )
    assert not found.all_right
    assert not Check("one", "NaN is wrong", float("nan"), 1.0).right


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main([]) == NO_GPU
    assert "--cpu" in capsys.readouterr().err


# ---------------------------------------------------------------- tuning


def test_the_search_keeps_what_is_clearly_better_field_by_field() -> None:
    table = Launch()

    def measure(launch: Launch) -> Tried:
        if launch.stages == 4:
            return Tried(launch, float("inf"), "OutOfResources")
        return Tried(launch, 1.0 - 0.1 * (launch.keys == 128) - 0.01 * (launch.warps == 8))

    fields = {"keys": (32, 64, 128), "warps": (4, 8), "stages": (3, 4), "split": (64, 100)}
    best, tried = search(table, fields, measure)
    assert best.launch == Launch(keys=128), (
        "one in a hundred is noise, and what cannot be launched is no gain"
    )
    assert [one.launch.stages for one in tried if one.why] == [4]
    assert all(one.launch.split % one.launch.keys == 0 for one in tried), "no launch at all is not tried"


def test_what_is_written_is_what_the_server_reads(tmp_path: Path) -> None:
    path = tmp_path / "kvferry" / "tuning.json"
    write_tuning(path, Launch(keys=128, warps=8), Launch())
    assert read_tuning(path) == {"attention": {"keys": 128, "warps": 8}}
    assert list(path.parent.iterdir()) == [path]
