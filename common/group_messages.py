"""Messages between two workers that make a process group for their blocks (`transfer/rendezvous.py`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from common.bounds import Count, Positive, Why, Word
from common.messages import Message
from common.request import Incarnation, WorkerId


@dataclass(frozen=True, slots=True)
class Join(Message):
    """P asks D to make a process group with it. `first`: the number of the first block that will come over it; drawn,
    so that headers of an earlier group are none of this one."""

    worker: WorkerId
    incarnation: Incarnation
    block_bytes: Positive
    first: Count


@dataclass(frozen=True, slots=True)
class Published(Message):
    """An entry of the group's store, from either to the other."""

    key: Word
    value: Annotated[bytes, Field(max_length=4096)]


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """D takes what comes over the group for as long as this connection stands."""


@dataclass(frozen=True, slots=True)
class NotJoined(Message):
    reason: Why
