"""Bounds of what a message may hold, checked where it is read. Pure.

What arrives is used as an index, a time, a size, an address or the key of a table without another look, and some of
it is kept for long: what is out of bounds is refused at the door, or cut where only people read it. Whoever makes a
message for the wire keeps inside them; they are far wider than anything that we say.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Positive = Annotated[int, Field(gt=0, lt=1 << 62)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]  # as they travel packed
Index = Annotated[int, Field(ge=0, lt=1 << 31)]  # the same, of a token in its answer

SHORT = Field(max_length=1024)
Word = Annotated[str, SHORT]
"""What becomes a key, or is kept."""

FEW = Field(max_length=64)
"""Entries of a table that has a handful."""

Endpoint = Annotated[str, Field(max_length=300, pattern=r"^tcp://[A-Za-z0-9_.:%*\[\]-]+:[0-9]{1,5}$")]
"""Where a socket connects to: never a file, a pipe or another transport because a peer said so."""

MAX_WHY_CHARS = 2000

Why = Annotated[str, AfterValidator(lambda text: text[:MAX_WHY_CHARS])]
"""For people: cut, never refused. It may quote what somebody else said."""
