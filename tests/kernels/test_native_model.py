"""The whole forward pass in one native call: the bits of the layer-by-layer one, near torch, whatever lay in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.backend import TorchBackend
from kernels.native_backend import NativeBackend, load_native
from kernels.runner import ModelRunner, load_runner
from kernels.step import StepLayout
from tests.kernels.tiny_models import save_model

pytestmark = pytest.mark.skipif(load_native() is None, reason="no C extension here")

_ROWS = [(0, 70), (33, 1), (64, 1), (15, 40), (0, 1), (100, 2)]
_TOLERANCE = {"float32": 2e-4, "float16": 0.03, "bfloat16": 0.25}


def _runner(folder: Path, dtype: str, threads: int = 1) -> ModelRunner:
    return load_runner(
        str(folder), dtype=dtype, device="cpu", num_blocks=80, max_model_len=400, threads=threads
    )


def _step(rows: list[tuple[int, int]], num_blocks: int) -> StepLayout:
    """Rows of one sequence each, their tables scattered over the pool, in slots of their own."""
    generator = np.random.default_rng(3)
    tables = generator.permutation(num_blocks)[: 9 * len(rows)].reshape(len(rows), 9).astype(np.int32)
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    slots = np.arange(len(rows))[::-1]
    return StepLayout(starts, counts, slots.copy(), tables, 16, torch.device("cpu"))


def _fill(runner: ModelRunner, step: StepLayout) -> None:
    """A past for every row; NaN wherever nothing is that a row may read."""
    cache, generator = runner.cache, torch.Generator().manual_seed(1)
    cache.tensor.fill_(float("nan"))
    for start, table in zip(step.starts.tolist(), step.tables[step.slots], strict=True):
        places = torch.arange(start)
        blocks = torch.from_numpy(table).long()[places // 16]
        for layer in range(cache.layout.num_layers):
            shape = (2, start, cache.layout.num_kv_heads, cache.layout.head_dim)
            k, v = torch.randn(shape, generator=generator)
            cache.store(layer, blocks, places % 16, k, v)


def _token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("llama-gqa3-tied", 32),
        ("llama-mha-untied", 48),
        ("qwen2-biases", 16),
        ("qwen3-qk-norm", 32),
    ],
)
def test_same_bits_as_layer_by_layer_and_near_torch(
    name: str, head_dim: int, dtype: str, tmp_path: Path
) -> None:
    save_model(name, tmp_path, head_dim=head_dim)
    runner = _runner(tmp_path, dtype)
    model, step = runner.model, _step(_ROWS, 80)
    ids = _token_ids(step.num_tokens)
    assert isinstance(model.backend, NativeBackend)
    found, caches = [], []
    with torch.inference_mode():
        for forward in (model.forward, model.forward_by_layers):
            _fill(runner, step)
            found.append(forward(ids, step, runner.cache))
            caches.append(runner.cache.tensor.clone().view(torch.uint8))
        model.backend = TorchBackend()
        _fill(runner, step)
        reference = model.forward_by_layers(ids, step, runner.cache)
    assert torch.equal(found[0], found[1]) and torch.equal(caches[0], caches[1])
    assert found[0].isfinite().all() and reference.float().std() > 0.3
    torch.testing.assert_close(
        found[0].float(), reference.float(), atol=_TOLERANCE[dtype], rtol=_TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_is_alone_in_any_step_on_any_threads(dtype: str, tmp_path: Path) -> None:
    """Larger and smaller steps before it leave their numbers in the memory that steps share."""
    save_model("qwen3-qk-norm", tmp_path)
    step = _step(_ROWS, 80)
    ids = _token_ids(step.num_tokens)
    wholes = []
    for threads in (1, 2):
        runner = _runner(tmp_path, dtype, threads)
        with torch.inference_mode():
            _fill(runner, step)
            whole = runner.model.forward(ids, step, runner.cache)
            wholes.append(whole)
            for row, (start, count) in enumerate(_ROWS):
                first = int(step.firsts[row])
                for at in range(start, start + count, 13):
                    part = min(13, start + count - at)
                    alone = StepLayout(
                        np.array([at], dtype=np.int32),
                        np.array([part], dtype=np.int32),
                        step.slots[row : row + 1],
                        step.tables,
                        16,
                        torch.device("cpu"),
                    )
                    place = first + at - start
                    hidden = runner.model.forward(ids[place : place + part].clone(), alone, runner.cache)
                    assert torch.equal(hidden, whole[place : place + part]), (threads, row, at)
    assert torch.equal(wholes[0], wholes[1])


def test_an_overflow_stays_with_its_sequence(tmp_path: Path) -> None:
    save_model("qwen3-qk-norm", tmp_path)
    runner = _runner(tmp_path, "float32")
    step = _step(_ROWS, 80)
    ids = _token_ids(step.num_tokens)
    with torch.inference_mode():
        _fill(runner, step)
        whole = runner.model.forward(ids, step, runner.cache)
        _fill(runner, step)
        runner.cache.tensor[step.tables[step.slots[2], 1]] = float("nan")
        broken = runner.model.forward(ids, step, runner.cache)
    token = int(step.firsts[2])
    others = torch.arange(step.num_tokens) != token
    assert broken[token].isnan().all() and torch.equal(broken[others], whole[others])


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    save_model("qwen3-qk-norm", tmp_path)
    runner = _runner(tmp_path, "float32")
    for wrong in (-1, 211):
        with pytest.raises(IndexError, match="211"):
            runner.model.forward(torch.tensor([5, wrong]), _step([(0, 2)], 80), runner.cache)
