"""The short way of a streamed token: from the cluster's word to the client's socket with no task between.

Why: waking a task for every token, and six coroutines from there to the socket, took more of a core than all else that
a token needs. So once a stream has begun, the control plane hands a plain token to `Relay.take` where it reads it. What
is not plain goes by the mailbox to `Generation`, which has the answer's end and whatever fails: log-probabilities, stop
strings, tools, echo, several tokens at once, the last one, and any token while the client's socket is full.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from coordinator.answer import Answer
from coordinator.door.response_writer import ResponseWriter
from coordinator.first_token import FirstTokenPacing
from coordinator.metrics import RequestMeter
from coordinator.openai.shapes import ChunkShape


class Relay:
    """Of one stream, all of whose `answers` are plain."""

    __slots__ = ("_answers", "_meter", "_out", "_pacing", "_prompt_tokens", "_shape")

    def __init__(
        self,
        answers: Sequence[Answer],
        shape: ChunkShape,
        meter: RequestMeter,
        pacing: FirstTokenPacing,
        prompt_tokens: int,
        out: ResponseWriter,
    ) -> None:
        self._answers = answers
        self._shape = shape
        self._meter = meter
        self._pacing = pacing
        self._prompt_tokens = prompt_tokens
        self._out = out

    def take(self, choice: int, token_id: int) -> bool:
        """Writes what the choice's next token shows. False, and nothing is done, while that would have to wait."""
        if not self._out.goes_at_once:
            return False
        text = self._answers[choice].push_token(token_id)
        now_s = time.monotonic()
        gap_s = self._meter.tokens_accepted(1, self._prompt_tokens, now_s, choice)
        if gap_s is not None:
            self._pacing.observed(gap_s)
        if text:
            self._out.events_now(self._shape.text(choice, text), now_s)
            self._meter.token_out(now_s, choice)
        return True
