"""The longest prompt that fits the model's context, to its last position, through both pools and collocated.

On the first two layers of the default model, in bfloat16: attention over 8,000 keys takes minutes on all thirty
and is the same code in each. (All thirty were compared once by hand: see the closing note of the issue.)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from bench.virtual_worker import Shape
from kernels.model import CausalModel
from kernels.runner import load_runner
from tests.exactness.conftest import greedy
from tests.exactness.real_cluster import BLOCK, THREADS, Ask, RealCluster, Said

CONTEXT = 8192
LAYERS = 2
OUTPUTS = 4


@pytest.fixture(scope="module")
def shallow(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """The default model without its upper layers."""
    folder = tmp_path_factory.mktemp("shallow")
    config = json.loads((smollm2_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    with safe_open(smollm2_dir / "model.safetensors", "pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _is_kept(name)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors")
    return load_runner(str(folder), dtype="bfloat16", device="cpu", num_blocks=1, threads=THREADS).model


def _is_kept(name: str) -> bool:
    parts = name.split(".")
    return parts[1] != "layers" or int(parts[2]) < LAYERS


def answer(model: CausalModel, prefill: int, chunk: int, prompt: tuple[int, ...]) -> Said:
    shape = Shape(CONTEXT // BLOCK, BLOCK, 4, chunk)
    cluster = RealCluster(
        model, prefill=prefill, decode=1, prefill_shape=shape, decode_shape=shape, max_model_len=CONTEXT
    )
    (said,) = cluster.together([Ask(prompt, greedy(OUTPUTS))])
    return said


def test_the_longest_that_fits(shallow: CausalModel, text_ids: list[int]) -> None:
    """Prompt and answer fill the context and both pools to the last block."""
    prompt = tuple((text_ids * 5)[: CONTEXT - OUTPUTS])
    assert len(prompt) + OUTPUTS == CONTEXT
    through_pools = answer(shallow, 1, 500, prompt)
    assert through_pools.end == "length" and len(through_pools.ids) == OUTPUTS
    assert through_pools == answer(shallow, 0, 512, prompt)
