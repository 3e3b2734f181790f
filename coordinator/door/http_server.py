"""The HTTP server under the app: its socket, and uvicorn with our connections, limits and TLS."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace

import uvicorn

from common.errors import CannotBind
from coordinator.door.connection import Connections
from coordinator.door.front_door import ASGIApp
from coordinator.door.limits import SEND_BUFFER_BYTES, Limits

log = logging.getLogger("kvferry.http")

IDLE_KEEP_ALIVE_S = 75
FILES_BESIDE_CONNECTIONS = 256
ANYBODY_CAN_CAUSE = ("Invalid HTTP request received.", "Unsupported upgrade request.")


def listen(host: str, port: int) -> socket.socket:
    """The bound socket. `host`: a name, or an address, IPv6 with brackets or without. Raises CannotBind."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotBind(f"{host} port {port}: {error.strerror or error}; choose another --host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The connections that it accepts inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind(where)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CannotBind(f"{host} port {port}: {error.strerror or error}; choose another --port") from error
    return listener


def within_open_files(limits: Limits) -> Limits:
    """Every connection is an open file: asks the system for as many as `max_connections` needs, and takes fewer
    connections where it gives fewer. Without that, accepting fails for all when the first one too many comes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + FILES_BESIDE_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            room = max(1, soft - FILES_BESIDE_CONNECTIONS)
            log.warning("the system allows %d open files: at most %d connections (ulimit -n)", soft, room)
            return replace(limits, max_connections=room)
    return limits


def make_server(
    app: ASGIApp, limits: Limits, connection_closed: Callable[[str], None], tls: ssl.SSLContext | None = None
) -> uvicorn.Server:
    """uvicorn as this app wants it: `await server.serve(sockets=[…])`. `connection_closed` hears the reason of every
    connection that a limit ends.

    On uvloop: asyncio leaves Nagle's delay on for sockets that were not made with IPPROTO_TCP, and a response, two
    writes, then takes 40 ms more.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
    config = uvicorn.Config(
        app,
        http=Connections(limits, connection_closed, tls).make,  # type: ignore[arg-type]  # is called like a class
        ws="none",
        lifespan="off",
        access_log=False,  # one line for each request is logged by `Generation`, with what it cost
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_KEEP_ALIVE_S,
    )
    return uvicorn.Server(config)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whoever can connect can send what is not HTTP, as often as they like: it has its answer, and fills no log."""
    return record.msg not in ANYBODY_CAN_CAUSE
