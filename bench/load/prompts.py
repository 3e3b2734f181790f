"""Prompts of a wanted number of tokens, as token ids or as words. Pure.

Ids say exactly what is wanted, whatever the tokenizer; servers of the vLLM kind take them in `/v1/completions`. Where
only text is taken (chat), a prompt is made of common English words that nearly every tokenizer spells as one token
each with the space before it; two questions at the start of a run measure what the server adds (a chat template, a
first token) and whether a word is a token there (`Words`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from bench.load.plan import IDS, stream_seed
from bench.load.records import Planned

_TEXT = """
the of and to in is was for that on with as by at from his it an were are which this be had or first one their
its new not after who they have her she two been other when there all during time over more between some only
years most part well city up out work where about state world under people such year three while used against
name house war both late early many since known may before small large end life left right until second day
public best each like them these being those then can made no him through will would so into he but great long
high school local point water power group game place week night head side line body book word land area town
road river music film white black open play start four five six set run form order model company family
century south north season party
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Words:
    """A text prompt of n words has about `added + n * per_word` tokens at this server."""

    added: int = 0
    per_word: float = 1.0

    def count_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.added) / self.per_word))

    @property
    def exact(self) -> bool:
        return self.per_word == 1.0


def measured_words(few: tuple[int, int], many: tuple[int, int]) -> Words:
    """From two pairs of (words asked, prompt tokens counted)."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if per_word <= 0:
        return Words()
    return Words(round(few[1] - few[0] * per_word), per_word)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Prompts of one run: ids in [low, high), the same for the same seed, request and shared blocks."""

    seed: int
    low: int
    high: int
    block_tokens: int = 0
    words: Words | None = None
    _blocks: dict[int, list[int]] = field(default_factory=dict)

    def ids(self, planned: Planned) -> list[int]:
        count = planned.prompt_tokens
        if self.words is not None:
            count = self.words.count_for(count)
        ids: list[int] = []
        for name in planned.shared:
            if len(ids) < count:
                ids += self._block(name)
        del ids[count:]
        if len(ids) < count:
            ids += self._drawn((0, planned.index + 2**31), count - len(ids))
        return ids

    def as_json(self, planned: Planned) -> str:
        """The value of `prompt`: a list of ids, or a text."""
        ids = self.ids(planned)
        return json.dumps(" ".join([WORDS[id] for id in ids]) if self.words is not None else ids)

    def _block(self, name: int) -> list[int]:
        found = self._blocks.get(name)
        if found is None:
            found = self._drawn((1, name + 2**31), self.block_tokens)
            if name < 0:  # the one before every prompt; a trace has too many to keep
                self._blocks[name] = found
        return found

    def _drawn(self, names: tuple[int, int], count: int) -> list[int]:
        random = np.random.default_rng([stream_seed(self.seed, IDS), *names])
        drawn: list[int] = random.integers(self.low, self.high, count).tolist()
        return drawn


def words_maker(seed: int, words: Words, block_tokens: int) -> PromptMaker:
    return PromptMaker(seed, 0, len(WORDS), block_tokens, words)
