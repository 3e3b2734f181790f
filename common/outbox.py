"""Rows on their way to the fronts: tokens, one message per front per step, and log-probabilities of prompts. Pure.

Messages are numbered per front, so that a lost one shows. A chunk of a prompt with twenty alternatives to each token
can be larger than a message may be, so prompt rows are cut; they travel before the tokens of their step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from common.effects import Effect, ToFront
from common.messages import PromptRow, TokenRow, Tokens
from common.request import FrontId

PROMPT_BYTES = 1 << 17
"""Of prompt rows in one message: far below the limit, so that reading one does not keep a front from the others."""
MAX_FRONTS = 64
_ROW_BYTES = 600  # id, attempt, names of fields
_TOKEN_BYTES = 40
_TOP_BYTES = 16


class Outbox:
    def __init__(self) -> None:
        self.last_seq: dict[str, int] = {}
        self._rows: dict[FrontId, list[TokenRow]] = {}
        self._prompts: dict[FrontId, list[PromptRow]] = {}

    def put(self, front: FrontId, row: TokenRow) -> None:
        rows = self._rows.get(front)
        if rows is None:
            rows = self._rows[front] = []
        rows.append(row)

    def put_prompt(self, front: FrontId, row: PromptRow) -> None:
        self._prompts.setdefault(front, []).append(row)

    def flush(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._prompts:
            for front, prompts in self._prompts.items():
                effects += [self._message(front, (), part) for part in messages_of(prompts)]
            self._prompts = {}
        if self._rows:
            effects += [self._message(front, tuple(rows), ()) for front, rows in self._rows.items()]
            self._rows = {}
        return effects

    def _message(self, front: FrontId, rows: tuple[TokenRow, ...], prompts: tuple[PromptRow, ...]) -> Effect:
        seq = self.last_seq.pop(front, 0) + 1
        self.last_seq[front] = seq
        if len(self.last_seq) > MAX_FRONTS:  # the one that has long had nothing begins again
            del self.last_seq[next(iter(self.last_seq))]
        return ToFront(front, Tokens(seq, rows, prompts))


def messages_of(rows: list[PromptRow]) -> Iterator[tuple[PromptRow, ...]]:
    """The rows in groups of at most about PROMPT_BYTES, long ones cut."""
    group: list[PromptRow] = []
    left = PROMPT_BYTES
    for row in rows:
        token_bytes = _TOKEN_BYTES + _TOP_BYTES * max(len(one.top) for one in row.logprobs)
        at = 0
        while at < len(row.logprobs):
            room = (left - _ROW_BYTES) // token_bytes
            if room > 0:
                part = row.logprobs[at : at + room]
                group.append(replace(row, first=row.first + at, logprobs=part))
                at += len(part)
                left -= _ROW_BYTES + token_bytes * len(part)
            if at < len(row.logprobs):
                assert group, "one token is larger than a message"
                yield tuple(group)
                group, left = [], PROMPT_BYTES
    if group:
        yield tuple(group)
