"""A connection until its TLS stands: counted, and ended in time, from the moment it is accepted.

Why not uvicorn's way, which gives the context to the event loop's server: that one tells nobody of a connection
before its handshake is over. Who connects and says nothing would count nowhere, and be held for the loop's 60 s. So
the server accepts plain connections, and each becomes TLS here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.door.connection import Connection, Connections


class Handshake(asyncio.Protocol):
    """What the server makes in the place of `connection`, which is made when the two have understood each other."""

    def __init__(self, all_connections: Connections, connection: Connection, context: ssl.SSLContext) -> None:
        self._all = all_connections
        self._connection = connection
        self._context = context
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # The accepted transport would read the client's first bytes itself. So it goes, and a new one takes its
        # socket.
        connected = transport.get_extra_info("socket").dup()
        transport.abort()
        self._all.handshakes[self._connection] = self
        if not self._all.make_room(self._connection):
            connected.close()
            self.end("too_many_connections")
            return
        self._all.idle[self] = None
        loop, limit_s = self._connection.loop, self._all.limits.head_timeout_s
        shaking = loop.connect_accepted_socket(
            lambda: self._connection, connected, ssl=self._context, ssl_handshake_timeout=limit_s
        )
        self._work = loop.create_task(self._watch(shaking))

    def end(self, reason: str) -> None:
        """Cuts it."""
        self._all.closed(reason)
        self.over()
        if self._work is not None:
            self._work.cancel()

    def over(self) -> None:
        """It has become a connection, or will not. Idempotent."""
        self._all.handshakes.pop(self._connection, None)
        self._all.idle.pop(self, None)

    async def _watch(self, shaking: Coroutine[Any, Any, object]) -> None:
        try:
            await shaking
        except ConnectionAbortedError:  # by the loop, when its time was over
            self._all.closed("tls_handshake_timeout")
        except (
            Exception
        ):  # the client left, or spoke something else: anybody can cause it, so it fills no log
            return
        finally:
            self.over()
