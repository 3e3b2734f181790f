"""`X-Kvferry-Deadline-Ms`: how long the first token of an answer may take, from the request's head on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.errors import BadRequest, DeadlinePassed

DEADLINE_HEADER = "X-Kvferry-Deadline-Ms"
LONGEST_MS = 86_400_000
_NUMBER = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")


def read_deadline_s(values: Sequence[bytes]) -> float | None:
    """Seconds; None where the header is absent. Raises BadRequest."""
    if not values:
        return None
    if len(values) > 1:  # whichever were taken, somebody would be told nothing of the other one
        raise _bad(f"the header came {len(values)} times; send it once.")
    text = values[0].strip()
    number_ms = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < number_ms <= LONGEST_MS:
        raise _bad(f"expected milliseconds, a decimal number above 0 and at most {LONGEST_MS}.")
    return number_ms / 1e3


def _bad(what: str) -> BadRequest:
    return BadRequest(f"{DEADLINE_HEADER}: {what}", param=DEADLINE_HEADER, code="invalid_value")


def left_s(deadline_s: float | None, elapsed_s: float) -> float | None:
    """Of a deadline when so much time has gone by. Raises DeadlinePassed."""
    if deadline_s is None:
        return None
    if elapsed_s >= deadline_s:
        raise DeadlinePassed(
            f"The deadline of {deadline_s * 1e3:g} ms passed before the first token.", code="deadline"
        )
    return deadline_s - elapsed_s
