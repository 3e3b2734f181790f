"""A route that reads a JSON object and answers with one: body within its limits, errors as OpenAI's object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.responses import Response

from common.errors import KvferryError
from coordinator.door.http_body import ClientLeft, Receive, Scope, Send, read_body, read_fields
from coordinator.door.limits import Limits
from coordinator.door.response_writer import ResponseWriter

Fields = TypeVar("Fields")


class JsonAnswer(Response, Generic[Fields]):
    """Reads the body within its limits, and writes what `work` makes of it, which may say another status. `optional`:
    no body at all is `{}`."""

    def __init__(
        self,
        read: Callable[[dict[str, Any]], Fields],
        work: Callable[[Fields], Awaitable[bytes | tuple[int, bytes]]],
        limits: Limits,
        *,
        status: int = 200,
        optional: bool = False,
    ) -> None:
        super().__init__()
        self._read = read
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
            body = b"{}" if self._optional and not body else body
            answer = await self._work(await read_fields(body, self._read))
        except KvferryError as error:
            await out.error(error)
        else:
            status, body = answer if isinstance(answer, tuple) else (self._status, answer)
            await out.whole(body, status=status)
