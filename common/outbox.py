"""Token rows on their way to the fronts: one message per front per step, numbered so that a lost one shows. Pure."""

from __future__ import annotations

from common.effects import Effect, ToFront
from common.messages import TokenRow, Tokens
from common.request import FrontId


class Outbox:
    def __init__(self) -> None:
        self.last_seq: dict[str, int] = {}
        self._rows: dict[FrontId, list[TokenRow]] = {}

    def put(self, front: FrontId, row: TokenRow) -> None:
        rows = self._rows.get(front)
        if rows is None:
            rows = self._rows[front] = []
        rows.append(row)

    def flush(self) -> list[Effect]:
        if not self._rows:
            return []
        effects: list[Effect] = []
        for front, rows in self._rows.items():
            seq = self.last_seq.get(front, 0) + 1
            self.last_seq[front] = seq
            effects.append(ToFront(front, Tokens(seq, tuple(rows))))
        self._rows = {}
        return effects
