"""What front and coordinator say to each other: requests, and how they go. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from common.bounds import Count, Seconds, Why
from common.messages import FinishReason, Message
from common.request import Attempt, Request, RequestId


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """A group: what one HTTP request asks for, mostly one request, taken in whole or not at all. `Admitted` and
    `Rejected` answer for all of it by the first id."""

    requests: Annotated[tuple[Request, ...], Field(min_length=1)]
    deadline_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Admitted(Message):
    id: RequestId


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    id: RequestId
    error: str  # class name in common.errors
    reason: Why
    retry_after_s: Seconds = 0.0
    code: str = ""  # where the error's own does not say enough
    param: str = ""  # the field of the request that is at fault, where one is


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Output tokens the front has accepted, contiguous: rows of (id, first output index, ids). `gaps` are attempts
    from which tokens are missing before those that came: such an attempt cannot go on."""

    rows: tuple[tuple[RequestId, Count, tuple[int, ...]], ...]
    gaps: tuple[tuple[RequestId, Attempt], ...] = ()


@dataclass(frozen=True, slots=True)
class CancelRequest(Message):
    """The client left, or the front gives up: `reason` is counted."""

    id: RequestId
    reason: Why


@dataclass(frozen=True, slots=True)
class StopRequest(Message):
    """A stop string was found: the answer is complete."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFinished(Message):
    """Front to coordinator: the last token was accepted."""

    id: RequestId
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class RequestEnded(Message):
    """Coordinator to front: the request failed for good (`error` is a class name in common.errors)."""

    id: RequestId
    error: str
    reason: Why
