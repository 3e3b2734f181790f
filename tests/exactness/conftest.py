"""Real weights in each dtype, real prompts, and the oracle: each request alone, whole, on a worker of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from common.request import SamplingParams
from kernels.cache import dtype_name
from kernels.model import CausalModel
from kernels.runner import load_runner
from tests.exactness.real_cluster import BLOCK, THREADS, Ask, Said, collocated

CHUNK = 128
LENGTHS = (
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK),
    *(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 600),
)
OUTPUTS = 8
LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def text_ids(smollm2_dir: Path) -> list[int]:
    """Real text as token ids: 2,000 and more."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return list(tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids)


class Oracle:
    """What a request alone, in one chunk where it fits, gets from a worker that has seen no other."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._known: dict[Ask, Said] = {}

    def __call__(self, asks: Sequence[Ask]) -> list[Said]:
        unknown = [ask for ask in asks if ask not in self._known]
        if unknown:
            answers = collocated(self._model, caching=False).alone(unknown)
            self._known |= dict(zip(unknown, answers, strict=True))
        return [self._known[ask] for ask in asks]


@dataclass(frozen=True, slots=True)
class Loaded:
    model: CausalModel
    oracle: Oracle


Load = Callable[[str], Loaded]


@pytest.fixture(scope="session")
def load(smollm2_dir: Path) -> Iterator[Load]:
    """By dtype, each once and kept, in whatever order tests ask: what an oracle knows took it ten seconds."""
    threads_before = torch.get_num_threads()

    @cache
    def loaded(dtype: str) -> Loaded:
        runner = load_runner(str(smollm2_dir), dtype=dtype, device="cpu", num_blocks=1, threads=THREADS)
        return Loaded(runner.model, Oracle(runner.model))

    yield loaded
    torch.set_num_threads(threads_before)


@pytest.fixture(scope="session", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, load: Load) -> CausalModel:
    return load(request.param).model


@pytest.fixture(scope="session")
def oracle(model: CausalModel, load: Load) -> Oracle:
    return load(dtype_name(model.dtype)).oracle


def greedy(max_tokens: int = OUTPUTS) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, logprobs=5)


def seeded(seed: int, max_tokens: int = OUTPUTS) -> SamplingParams:
    """Temperature 1, and penalties, which depend on every token before."""
    return SamplingParams(
        max_tokens,
        seed=seed,
        temperature=1.0,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logprobs=5,
    )


@pytest.fixture(scope="session")
def asks(text_ids: list[int]) -> list[Ask]:
    """Every length greedily, four of them seeded: sixteen requests, no two with the same beginning."""
    prompts = [tuple(text_ids[7 * i : 7 * i + length]) for i, length in enumerate(LENGTHS)]
    drawn = [Ask(prompts[i], seeded(i)) for i in (0, 4, 8, 10)]
    return [Ask(prompt, greedy()) for prompt in prompts] + drawn
