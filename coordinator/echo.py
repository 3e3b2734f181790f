"""`echo`: every choice begins with its prompt's text, with log-probabilities where they are asked for. Pure.

A prompt's log-probabilities come with the first of its choices; what the others say meanwhile is held back. Stop
strings are not looked for in a prompt, and none of its tokens counts as an answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.request import TokenLogprobs
from coordinator.answer import Piece, ScoredToken, finite
from coordinator.detokenizer import Detokenizer
from coordinator.gateway import TokenDelta

PIECE_TOKENS = 256
"""Scored tokens in one piece: twenty alternatives to each of a whole prompt would be one event of megabytes."""
PIECE_CHARS = 16384
"""Of a piece without scores: a stream's writes are no larger than a few of these."""

Shown = list[tuple[int, Piece]]
"""Choices and what they show, in order."""


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as it is shown, and where in that text each token begins, in characters."""

    text: str
    ids: Sequence[int]
    offsets: Sequence[int]


def echoed_prompt(
    ids: Sequence[int], given: str | None, token_bytes: Callable[[int], bytes], *, scored: bool = True
) -> EchoedPrompt:
    """`given` is the text of a prompt that was not given as ids; special tokens are shown as they are written.
    Without log-probabilities nobody asks for offsets, and there are none.

    Offsets come from the tokens' own bytes. A tokenizer that puts a beginning token or a space before the text has
    more of those than `given`: what is too much lies at offset 0. One that rewrites the text itself (NFC) makes
    offsets approximate.
    """
    if not scored:
        text = b"".join(map(token_bytes, ids)).decode("utf-8", "replace") if given is None else given
        return EchoedPrompt(text, ids, ())
    detokenizer = Detokenizer(token_bytes)
    text = ""
    offsets = []
    for id in ids:
        offsets.append(detokenizer.decoded_chars)
        text += detokenizer.push(id)
    text += detokenizer.finish()
    if given is None or given == text:
        return EchoedPrompt(text, ids, offsets)
    before = len(text) - len(given) if text.endswith(given) else 0
    return EchoedPrompt(given, ids, [min(max(0, offset - before), len(given)) for offset in offsets])


class Echo:
    """The prompts of one HTTP request: one for each choice, and the choices that are the first of theirs."""

    def __init__(self, prompts: Sequence[EchoedPrompt], leaders: Sequence[int], scored: bool) -> None:
        self._prompts = prompts
        self._leader_of = [max(leader for leader in leaders if leader <= at) for at in range(len(prompts))]
        self._scored = scored
        self._logprobs: dict[int, list[TokenLogprobs]] = {leader: [] for leader in leaders}
        self._held: dict[int, Shown] = {leader: [] for leader in leaders}  # until its prompt is whole

    def begin(self) -> Shown:
        """What needs no worker's word."""
        return [one for leader in list(self._held) for one in self._release(leader)]

    def push(self, delta: TokenDelta, pieces: Sequence[Piece]) -> Shown:
        """What a choice says, as soon as its prompt has been shown."""
        leader = self._leader_of[delta.choice]
        said = [(delta.choice, piece) for piece in pieces]
        if leader not in self._held:
            return said
        self._held[leader] += said
        self._logprobs[leader] += delta.prompt_logprobs
        return self._release(leader)

    def _release(self, leader: int) -> Shown:
        prompt = self._prompts[leader]
        if self._scored and len(self._logprobs[leader]) < len(prompt.ids) - 1:
            return []
        pieces = self._pieces(prompt, self._logprobs.pop(leader))
        choices = [choice for choice, first in enumerate(self._leader_of) if first == leader]
        return [(choice, piece) for choice in choices for piece in pieces] + self._held.pop(leader)

    def _pieces(self, prompt: EchoedPrompt, logprobs: list[TokenLogprobs]) -> list[Piece]:
        if not self._scored:
            places = range(0, len(prompt.text), PIECE_CHARS)
            return [Piece(prompt.text[at : at + PIECE_CHARS]) for at in places]
        told = [None, *(finite(one) for one in logprobs)]
        tokens = [
            ScoredToken(id, one, offset)
            for id, one, offset in zip(prompt.ids, told, prompt.offsets, strict=True)
        ]
        cuts = [0, *(tokens[at].offset for at in range(PIECE_TOKENS, len(tokens), PIECE_TOKENS))]
        texts = [prompt.text[a:b] for a, b in zip(cuts, [*cuts[1:], len(prompt.text)], strict=True)]
        return [
            Piece(text, tuple(tokens[number * PIECE_TOKENS :][:PIECE_TOKENS]))
            for number, text in enumerate(texts)
        ]
