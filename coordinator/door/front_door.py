"""What every request passes before its route: its time is taken, its key checked, its place given, its id echoed.
Pages of other origins are turned away from what changes the cluster (`pages.py`).

Pure ASGI, because a middleware that wraps the response (Starlette's decorator kind) hides that the client left.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from common.errors import KvferryError, NotAdmitted, Unauthorized
from coordinator.deadline_header import DEADLINE_HEADER
from coordinator.door.http_body import ASGIMessage, Receive, Scope, Send
from coordinator.door.pages import comes_from_elsewhere
from coordinator.door.response_writer import ResponseWriter
from coordinator.errors_http import NotForPages, code_of, internal_error

log = logging.getLogger("kvferry.http")

OPEN = ("/health",)
"""Without a key even where keys are set: probes of orchestrators and load balancers carry none."""
WITHOUT_PLACE = ("GET", "HEAD", "OPTIONS")
RETRY_AFTER_S = 1.0
MAX_REQUEST_ID_CHARS = 200
ARRIVAL = "kvferry.arrival"
_DEADLINE = DEADLINE_HEADER.lower().encode()

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the request's head came (monotonic), whose key it brought (None where no keys are set), what the client
    calls it (empty where it has no name for it), and its headers for a deadline, unread: one, or none."""

    started_s: float
    tenant: str | None
    client_id: str
    deadlines: tuple[bytes, ...]


class FrontDoor:
    """Wraps the app. Without `api_keys`, everything is open.

    Requests with a body take one of `max_concurrent_requests` places from their head to the end of their answer;
    those without (health, metrics, lists) take none, as they are answered at once. `rejected` hears the code of
    every refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_concurrent_requests: int,
        rejected: Callable[[str], None],
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._allowed_origins = allowed_origins
        self._max_concurrent_requests = max_concurrent_requests
        self._rejected = rejected
        self._num_requests = 0
        # Digests have one length, so comparing them tells nothing of a key's.
        self._keys = {_digest(key.encode()): tenant_of(key) for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        headers = dict(reversed(scope["headers"]))
        client_id = _request_id(headers.get(b"x-request-id", b""))
        send = _echoing(send, client_id)
        tenant = self._tenant(headers.get(b"authorization", b"")) if self._keys else None
        if self._keys and tenant is None and scope["path"] not in OPEN:
            await self._refuse(_unauthorized(), receive, send)
            return
        if comes_from_elsewhere(
            scope["method"], scope["path"], scope["scheme"], headers, self._allowed_origins
        ):
            await self._refuse(_from_elsewhere(), receive, send)
            return
        deadlines = tuple(value for name, value in scope["headers"] if name == _DEADLINE)
        scope[ARRIVAL] = Arrival(started_s, tenant, client_id.decode(), deadlines)
        if scope["method"] in WITHOUT_PLACE:
            await self._guarded(scope, receive, send)
        elif self._num_requests >= self._max_concurrent_requests:
            await self._refuse(self._full(), receive, send)
        else:
            self._num_requests += 1
            try:
                await self._guarded(scope, receive, send)
            finally:
                self._num_requests -= 1

    async def _refuse(self, error: KvferryError, receive: Receive, send: Send) -> None:
        self._rejected(code_of(error))
        await ResponseWriter(send).error(error, unread=receive)

    def _full(self) -> KvferryError:
        return NotAdmitted(
            f"{self._max_concurrent_requests} requests are being served, and no more are taken at once.",
            retry_after_s=RETRY_AFTER_S,
            code="too_many_requests",
        )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The last resort: what no route caught becomes a 500 that says nothing of the inside."""
        started = False

        async def watched(message: ASGIMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await ResponseWriter(send).error(internal_error())

    def _tenant(self, authorization: bytes) -> str | None:
        """Every key is compared, in constant time, whichever matches."""
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        found = None
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def tenant_of(key: str) -> str:
    """The name of whoever has this key: it tells nothing of the key itself."""
    return f"key-{_digest(key.encode()).hex()[:12]}"


def _unauthorized() -> KvferryError:
    return Unauthorized(
        "A valid API key is needed: send the header `Authorization: Bearer KEY`.", code="invalid_api_key"
    )


def _from_elsewhere() -> KvferryError:
    return NotForPages(
        "A web page of another origin may not do this; name its origin with --allowed-origins if it should.",
        code="cross_origin",
    )


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()


def _request_id(value: bytes) -> bytes:
    """The client's id as it may be echoed and logged: printable ASCII, cut. It names nothing here."""
    return bytes(byte for byte in value[:MAX_REQUEST_ID_CHARS] if 0x20 <= byte < 0x7F)


def _echoing(send: Send, request_id: bytes) -> Send:
    if not request_id:
        return send

    async def echoing(message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await send(message)

    return echoing
