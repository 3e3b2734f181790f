"""A worker's connections to the fronts, which it gives the tokens of its steps."""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from common.endpoints import Endpoint, parse_endpoint
from common.wire import MAX_MESSAGE_BYTES
from transfer.sockets import Sockets

log = logging.getLogger(__name__)

CALL_AGAIN_S = 1.0  # after a front refused us: its key may be another by then


class Fronts:
    """Use inside a running event loop."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._open: dict[str, tuple[str, zmq.asyncio.Socket]] = {}

    def get(self, name: str) -> zmq.asyncio.Socket | None:
        return self._open[name][1] if name in self._open else None

    def follow(self, told: dict[str, str], coordinator: Endpoint) -> None:
        """What the coordinator says of them: new ones, moved ones, gone ones. One that listens on every address is
        reached where `coordinator` is."""
        endpoints = {
            name: str(parse_endpoint(one).reached_at(coordinator.host)) for name, one in told.items()
        }
        for name, (endpoint, socket) in list(self._open.items()):
            if endpoints.get(name) != endpoint:
                socket.close(linger=0)
                del self._open[name]
        for name, endpoint in endpoints.items():
            if name not in self._open:
                self._connect(name, endpoint)

    def _connect(self, name: str, endpoint: str) -> None:
        def gave_up() -> None:
            asyncio.get_running_loop().call_later(CALL_AGAIN_S, again)

        def again() -> None:
            if self.get(name) is socket and not socket.closed:
                socket.close(linger=0)
                del self._open[name]
                self._connect(name, endpoint)

        where = f"the front at {endpoint}"
        socket = self._sockets.calling(zmq.PUSH, MAX_MESSAGE_BYTES, where, gave_up=gave_up)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            log.warning("front %s cannot be reached at %s: %s", name, endpoint, error)
            return
        self._open[name] = (endpoint, socket)
