"""Rows on their way to the fronts: tokens, one message per front per step, and log-probabilities of prompts. Pure.

Messages are numbered per front, so that a lost one shows. A chunk of a prompt with twenty alternatives to each token
can be larger than a message may be, so prompt rows are cut; they travel before the tokens of their step. So can the
tokens of several steps, when the loop that sends them is late and each has its alternatives: they are cut between rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from common.effects import Effect, ToFront
from common.messages import PromptRow, TokenRow, Tokens
from common.request import FrontId

PART_BYTES = 1 << 17
"""Of rows in one message: far below the limit, so that reading one does not keep a front from the others."""
MAX_FRONTS = 64
_ROW_BYTES = 600  # id, attempt, names of fields
_TOKEN_BYTES = 40
_TOP_BYTES = 16
_COLUMNS_BYTES = 160  # of a row of tokens: its id, numbers and what it says beside them
PLAIN_ROWS = PART_BYTES // _COLUMNS_BYTES


class Outbox:
    def __init__(self) -> None:
        self.last_seq: dict[str, int] = {}
        self._rows: dict[FrontId, list[TokenRow]] = {}
        self._prompts: dict[FrontId, list[PromptRow]] = {}
        self._with_logprobs: set[FrontId] = set()

    def put(self, front: FrontId, row: TokenRow) -> None:
        rows = self._rows.get(front)
        if rows is None:
            rows = self._rows[front] = []
        rows.append(row)
        if row.logprobs is not None:
            self._with_logprobs.add(front)

    def put_prompt(self, front: FrontId, row: PromptRow) -> None:
        self._prompts.setdefault(front, []).append(row)

    def flush(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._prompts:
            for front, prompts in self._prompts.items():
                effects += [self._message(front, (), part) for part in messages_of(prompts)]
            self._prompts = {}
        if self._rows:
            for front, rows in self._rows.items():
                whole = len(rows) <= PLAIN_ROWS and front not in self._with_logprobs
                parts = (tuple(rows),) if whole else parts_of(rows)
                effects += [self._message(front, part, ()) for part in parts]
            self._rows = {}
            self._with_logprobs.clear()
        return effects

    def _message(self, front: FrontId, rows: tuple[TokenRow, ...], prompts: tuple[PromptRow, ...]) -> Effect:
        seq = self.last_seq.pop(front, 0) + 1
        self.last_seq[front] = seq
        if len(self.last_seq) > MAX_FRONTS:  # the one that has long had nothing begins again
            del self.last_seq[next(iter(self.last_seq))]
        return ToFront(front, Tokens(seq, rows, prompts))


def parts_of(rows: list[TokenRow]) -> Iterator[tuple[TokenRow, ...]]:
    """The rows in groups of at most about PART_BYTES, none cut."""
    begin, left = 0, PART_BYTES
    for at, row in enumerate(rows):
        row_bytes = _COLUMNS_BYTES + sum(
            _TOKEN_BYTES + _TOP_BYTES * len(one.top) for one in row.logprobs or ()
        )
        if row_bytes > left and at > begin:
            yield tuple(rows[begin:at])
            begin, left = at, PART_BYTES
        left -= row_bytes
    yield tuple(rows[begin:])


def messages_of(rows: list[PromptRow]) -> Iterator[tuple[PromptRow, ...]]:
    """The rows in groups of at most about PART_BYTES, long ones cut."""
    group: list[PromptRow] = []
    left = PART_BYTES
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
                group, left = [], PART_BYTES
    if group:
        yield tuple(group)
