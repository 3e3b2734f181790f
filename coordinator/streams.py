"""Answers on their way from the front's ear to an HTTP response: one small mailbox per request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from common.errors import KvferryError
from common.request import RequestId
from coordinator.front import Delta
from coordinator.gateway import TokenDelta


class MailboxStream:
    """A `TokenStream`. What is in it is bounded by the request's own max_tokens; a slow reader holds up nobody."""

    def __init__(
        self, request_id: RequestId, on_stop: Callable[[], None], on_cancel: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.over = False
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._deltas: deque[TokenDelta] = deque()
        self._error: KvferryError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._cached_tokens: int | None = None

    # ------------------------------------------------------------ for the HTTP side

    async def next(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deltas.popleft()

    def stop(self) -> None:
        if not self.over:
            self.over = True
            self._on_stop()

    def cancel(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self._on_cancel(reason)

    # ------------------------------------------------------------ for the cluster's side

    def put(self, delta: Delta) -> None:
        if delta.cached_tokens is not None and self._cached_tokens is None:
            self._cached_tokens = delta.cached_tokens
        self._deltas.append(TokenDelta(delta.ids, delta.logprobs, delta.finish, self._cached_tokens or 0))
        self.over = self.over or delta.finish is not None
        self._wake()

    def fail(self, error: KvferryError) -> None:
        self.over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
