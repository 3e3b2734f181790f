"""A route that reads a JSON object and answers with one: body within its limits, errors as OpenAI's object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from common.errors import KvferryError
from coordinator.door.http_body import ClientLeft, Receive, Scope, Send, read_body
from coordinator.door.json_body import parse_object
from coordinator.door.limits import Limits
from coordinator.door.response_writer import ResponseWriter

Work = Callable[[dict[str, Any]], Awaitable[bytes]]


class JsonAnswer(Response):
    """Reads the body within its limits, and writes what `work` makes of it. `optional`: no body at all is `{}`."""

    def __init__(self, work: Work, limits: Limits, *, status: int = 200, optional: bool = False) -> None:
        super().__init__()
        self._work = work
        self._limits = limits
        self._status = status
        self._optional = optional

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = ResponseWriter(send)
        try:
            body = await read_body(scope, receive, self._limits.max_body_bytes, self._limits.body_timeout_s)
        except ClientLeft:
            return
        except KvferryError as error:
            await out.error(error, unread=receive)
            return
        try:
            fields = {} if self._optional and not body else parse_object(body)
            answer = await self._work(fields)
        except KvferryError as error:
            await out.error(error)
        else:
            await out.whole(answer, status=self._status)
