"""The seam between HTTP and the cluster: what the HTTP front may ask, as coroutines and plain data.

`coordinator/service.py` implements it over the pure coordinator and the sockets; `coordinator/http_api.py` uses
nothing else. More fronts later is a matter of implementing this over a wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.messages import FinishReason, Role
from common.request import Request, RequestId, TokenLogprobs


@dataclass(slots=True)
class TokenDelta:
    """New output tokens of one request, in order, none missing, none twice. Not frozen: one for every token.

    `logprobs` has one entry per id when they were asked for. `finish` is set on the last delta (which may have no
    ids). `cached_tokens` is the number of prompt tokens found in a prefix cache, the longer one's where both workers
    had some: the prefill worker's from the first delta on, the decode worker's from soon after.
    `choice` is the request's place in the group it was submitted in. `prompt_logprobs` continue those of earlier
    deltas, from prompt token 1 on; they are complete before the first delta with ids.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: FinishReason | None
    cached_tokens: int
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


TakeToken = Callable[[int, int], bool]
"""Takes a choice's next token at once, or says False and has done nothing: then it goes the long way."""


class TokenStream(Protocol):
    """The answers to one group of requests, as they come: each delta says by `choice` whose it is."""

    request_id: RequestId
    """Of the first of the group."""

    async def next(self) -> TokenDelta:
        """Waits for the next delta of any choice. Raises RequestFailed (or another KvferryError) when one of them
        failed for good, which ends them all; never waits without a limit. Not to be called when every choice has
        had a delta with `finish` or was stopped."""

    async def wait(self, limit_s: float) -> None:
        """Until `next` would not wait, at most so long."""

    def relay(self, take: TakeToken) -> None:
        """From now on a token that comes alone, with nothing said beside it, while `next` waits is offered to `take`
        first, where it came. What that raises `next` raises."""

    def stop(self, choice: int) -> None:
        """A stop string was found: this answer is complete, what comes later is thrown away. Idempotent."""

    def cancel(self, reason: str) -> None:
        """The client left or the front gives up: ends every choice. Idempotent, does nothing after the end."""


class Gateway(Protocol):
    def mint_id(self, prefix: str) -> RequestId:
        """A new id, unique for ever: `chatcmpl-…` or `cmpl-…`."""

    async def submit(self, requests: Sequence[Request], deadline_s: float | None = None) -> TokenStream:
        """All of a group or none. Raises NotAdmitted (429, with retry_after_s), NoWorker (503), BadRequest (400: can
        never fit)."""

    def max_model_len(self) -> int | None:
        """Longest prompt + answer that any pair of workers could hold; None while no worker is registered."""

    def system_fingerprint(self) -> str:
        """`fp_` and ten hex digits: the same as long as what decides the bits of answers is the same."""

    def health(self) -> str | None:
        """None when a request could be served now, else the reason why not."""

    def workers(self) -> list[dict[str, Any]]:
        """Rows of `GET /admin/workers` (contract)."""

    def drain_worker(self, worker_id: str, deadline_s: float) -> dict[str, Any] | None:
        """Its row, draining already: nothing new for it, what runs there may end within `deadline_s`, then its process
        ends. None when there is no such worker. Idempotent. Raises Conflict where it is lost."""

    def set_role(self, worker_id: str, role: Role, deadline_s: float) -> dict[str, Any] | None:
        """Its row: `becomes` says the role that it comes back in once it is drained, None where it has that one. None
        when there is no such worker. Idempotent. Raises Conflict where it cannot be done now."""

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """`GET /admin/requests/{id}`; None when the id is unknown or forgotten."""

    def metrics_text(self) -> bytes:
        """Prometheus text of the whole cluster."""
