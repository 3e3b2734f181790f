"""Answers on their way from the front's ear to an HTTP response: one small mailbox per group of requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import KvferryError
from common.request import RequestId, TokenLogprobs
from coordinator.front import Delta
from coordinator.gateway import TakeToken, TokenDelta

# What the objects of a delta take in this process, about: CPython 3.11's sizes, counted by tracemalloc.
DELTA_BYTES = 130
ID_BYTES = 40
LOGPROBS_BYTES = 75
TOP_BYTES = 120


class MailboxStream:
    """A `TokenStream`. A slow reader holds up nobody: what it has not taken waits here, and `waiting_bytes` is what
    that takes of memory. Whoever fills the mailbox ends the stream when that is too much."""

    def __init__(
        self,
        request_ids: Sequence[RequestId],
        on_stop: Callable[[RequestId], None],
        on_cancel: Callable[[RequestId, str], None],
    ) -> None:
        self.request_id = request_ids[0]
        self._live = dict(enumerate(request_ids))  # choices that have not ended
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._deltas: deque[TokenDelta] = deque()
        self._error: Exception | None = None
        self._take_token: TakeToken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader_asks = False
        self._bytes = 0
        self._cached_tokens: dict[int, int] = {}

    @property
    def over(self) -> bool:
        return not self._live

    # ------------------------------------------------------------ for the HTTP side

    async def next(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            await self._ask()
        self._reader_asks = False
        delta = self._deltas.popleft()
        self._bytes -= _size(delta)
        return delta

    async def wait(self, limit_s: float) -> None:
        if not self._deltas and self._error is None:
            await asyncio.wait((self._ask(),), timeout=limit_s)
            self._reader_asks = False

    def relay(self, take: TakeToken) -> None:
        self._take_token = take

    def _ask(self) -> asyncio.Future[None]:
        """Done when there is something to take."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._reader_asks = True
        return self._waiter

    def stop(self, choice: int) -> None:
        self._deltas = deque(delta for delta in self._deltas if delta.choice != choice)
        self._bytes = sum(map(_size, self._deltas))
        request_id = self._live.pop(choice, None)
        if request_id is not None:
            self._on_stop(request_id)

    def cancel(self, reason: str) -> None:
        while self._live:
            _, request_id = self._live.popitem()
            self._on_cancel(request_id, reason)

    # ------------------------------------------------------------ for the cluster's side

    @property
    def waiting_bytes(self) -> int:
        """0 while the reader asks for more: what has come in this turn of the loop it will take in the next."""
        return 0 if self._reader_asks else self._bytes

    def discard(self) -> None:
        """What waits will not be read."""
        self._deltas.clear()
        self._bytes = 0

    def put(self, choice: int, delta: Delta) -> None:
        if self._take_token is not None and self._reader_asks and not self._deltas and _is_plain(delta):
            try:
                if self._take_token(choice, delta.ids[0]):
                    return
            except (
                Exception
            ) as error:  # the reader's own, who hears of it: nobody else's tokens are held up by it
                self._error = self._error or error
                self._wake()
                return
        cached_tokens = self._cached_tokens.get(choice, 0)
        if delta.cached_tokens is not None and delta.cached_tokens > cached_tokens:
            cached_tokens = self._cached_tokens[choice] = delta.cached_tokens
        new = TokenDelta(
            delta.ids, delta.logprobs, delta.finish, cached_tokens, choice, delta.prompt_logprobs
        )
        self._deltas.append(new)
        self._bytes += _size(new)
        if delta.finish is not None:
            self.ended(choice)
        self._wake()

    def ended(self, choice: int) -> None:
        """It has nothing more to say. Idempotent."""
        self._live.pop(choice, None)

    def fail(self, error: KvferryError) -> None:
        """What has come can still be read, then `error` is raised."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_plain(delta: Delta) -> bool:
    """One more token and nothing else, as nearly all are."""
    return (
        delta.finish is None
        and delta.logprobs is None
        and delta.cached_tokens is None
        and len(delta.ids) == 1
        and not delta.prompt_logprobs
    )


def _size(delta: TokenDelta) -> int:
    size = DELTA_BYTES + ID_BYTES * len(delta.ids)
    if delta.logprobs or delta.prompt_logprobs:
        size += sum(map(_size_of_logprobs, (*(delta.logprobs or ()), *delta.prompt_logprobs)))
    return size


def _size_of_logprobs(logprobs: TokenLogprobs) -> int:
    return LOGPROBS_BYTES + TOP_BYTES * len(logprobs.top)


class NothingToSay:
    """A `TokenStream` of choices without a token: what is wanted is known without any worker."""

    def __init__(self, request_ids: Sequence[RequestId]) -> None:
        self.request_id = request_ids[0]
        self._left = deque(range(len(request_ids)))

    async def next(self) -> TokenDelta:
        return TokenDelta((), None, "length", 0, self._left.popleft())

    async def wait(self, limit_s: float) -> None:
        """All is there."""

    def relay(self, take: TakeToken) -> None:
        """No token will come."""

    def stop(self, choice: int) -> None:
        """Each has ended with its delta."""

    def cancel(self, reason: str) -> None:
        self._left.clear()
