"""A model's tokens over every path: in other chunks, alone, eager, and with its blocks moved between pools."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.gpu_check.driving import Asked, Tables, asked, decode, prefill
from bench.gpu_check.findings import Check
from bench.gpu_check.places import BLOCK_SIZE, MODELS, Place
from bench.gpu_check.weights import make_model, make_runner
from kernels.gpu.block_moves import copy_hashed, gather_hashed, scatter_hashed
from kernels.model import CausalModel
from kernels.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Story:
    """What is asked of a model, and the chunks that its prompts are cut into."""

    lengths: Sequence[int]
    wanted: int
    chunk: int
    others: Sequence[int]

    @property
    def max_model_len(self) -> int:
        return 16 * math.ceil((max(self.lengths) + self.wanted) / 16)

    def asked(self, name: str) -> Asked:
        return asked(self.lengths, int(MODELS[name]["vocab_size"]), self.wanted)

    def tables(self, name: str) -> list[list[int]]:
        """Of the pool that prompts are computed in. Who makes them anew, in another process too, gets the same."""
        return self.asked(name).tables(BLOCK_SIZE, seed=1)

    def num_blocks(self, name: str) -> int:
        return sum(self.asked(name).blocks_needed(BLOCK_SIZE))


STORIES = {
    "8B": Story((1, 17, 300, 513, 700), 16, 512, (64, 2048)),
    "small": Story((1, 16, 17, 100, 300, 513, 700), 24, 512, (1, 64, 2048)),
    "tiny": Story((1, 9), 2, 512, (4,)),
}


def poison(runner: ModelRunner) -> None:
    """Whatever is read that was not computed, or did not arrive, shows."""
    runner.cache.tensor.fill_(math.nan)


class Pools:
    """One model, a pool that prompts are computed in, and pools that tokens are decoded from."""

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.story = name, STORIES[name]
        length = self.story.max_model_len
        self.model: CausalModel = make_model(name, place)
        blocks, rows = self.story.num_blocks(name), len(self.story.lengths)
        self.prefill = make_runner(self.model, blocks, rows, length, eager=True)
        self.decode = make_runner(self.model, blocks, rows, length, eager=False)
        self.eager = make_runner(self.model, blocks, rows, length, eager=True)
        self.asked = self.story.asked(name)
        self.tables = self.story.tables(name)

    def said(
        self,
        asked: Asked,
        *,
        chunk: int,
        there: ModelRunner | None = None,
        tables: Tables | None = None,
        copied: bool = False,
    ) -> list[list[int]]:
        """Tokens of these requests. Prompts are computed in one pool; their blocks go to another pool, into other
        places, and are decoded there. `tables`: of the first pool, where not all requests are asked."""
        first = self.tables if tables is None else tables
        runner = there or self.decode
        poison(self.prefill)
        poison(runner)
        firsts = prefill(self.prefill, asked, first, chunk)
        second = [[len(self.decode.cache.tensor) - 1 - block for block in row] for row in first]
        move(self.prefill, first, runner, second, asked, copied=copied)
        return decode(runner, asked, firsts, second)

    def at_once(self) -> list[list[int]]:
        """Prompts and answers in one pool: nothing is moved."""
        poison(self.prefill)
        firsts = prefill(self.prefill, self.asked, self.tables, self.story.chunk)
        return decode(self.prefill, self.asked, firsts, self.tables)


def move(
    source: ModelRunner, first: Tables, target: ModelRunner, second: Tables, asked: Asked, *, copied: bool
) -> None:
    """Blocks of prompts, on the device: gathered and scattered, or copied in one launch. Raises RuntimeError where the
    hashes of what left and what came are not equal."""
    needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in asked.prompts]
    pairs = [
        [block for row, count in zip(tables, needed, strict=True) for block in row[:count]]
        for tables in (first, second)
    ]
    ours, theirs = (_bytes(runner) for runner in (source, target))
    numbers = torch.tensor(pairs, dtype=torch.int32, device=ours.device)
    if copied:
        came = copy_hashed(ours, theirs, numbers)
        left = gather_hashed(theirs, numbers[1], torch.empty_like(theirs[: len(pairs[0])]))
    else:
        staging = torch.empty_like(ours[: len(pairs[0])])
        left = gather_hashed(ours, numbers[0], staging)
        came = scatter_hashed(staging, numbers[1], theirs)
    if not torch.equal(left, came):
        raise RuntimeError("a block has another hash after its way")


def _bytes(runner: ModelRunner) -> torch.Tensor:
    return runner.cache.tensor.view(runner.cache.num_blocks, -1).view(torch.uint8)


def checks(pools: Pools) -> Iterator[Check]:
    """The tokens that the others are compared with: all together, in the story's chunks, over graphs, moved."""
    part, story = f"{pools.name} model", pools.story
    wanted = pools.said(pools.asked, chunk=story.chunk)
    distinct = len({token for row in wanted for token in row})
    # Logits of no meaning give one token again and again, and equal ones would say little.
    yield Check(part, "answers of one token alone", float(distinct <= len(wanted)), 0)

    def others(what: str, found: list[list[int]], right: list[list[int]] = wanted) -> Check:
        wrong = sum(
            ours != theirs
            for a, b in zip(found, right, strict=True)
            for ours, theirs in zip(a, b, strict=True)
        )
        return Check(part, f"{what}: tokens that are others", wrong, 0)

    yield others("again", pools.said(pools.asked, chunk=story.chunk))
    yield others("copied in one launch", pools.said(pools.asked, chunk=story.chunk, copied=True))
    yield others("prompt and answer in one pool", pools.at_once())
    for chunk in story.others:
        yield others(f"chunks of {chunk} tokens", pools.said(pools.asked, chunk=chunk))
    yield others("eager", pools.said(pools.asked, chunk=story.chunk, there=pools.eager))
    for index, length in enumerate(story.lengths):
        alone = pools.said(pools.asked.only(index), chunk=story.chunk, tables=pools.tables[index : index + 1])
        yield others(f"prompt of {length} tokens, alone", alone, wanted[index : index + 1])
    why = pools.decode.why_no_graphs
    yield Check(part, "decode steps run as graphs", float(why is not None), 0, why or "")
