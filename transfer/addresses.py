"""Where sockets are bound: names to numbers, which of this machine's addresses leads to another, any free port."""

from __future__ import annotations

import socket

import zmq
import zmq.asyncio

from common.endpoints import Endpoint, parse_endpoint
from common.errors import CannotBind


def bind(listener: zmq.asyncio.Socket, where: Endpoint, flag: str) -> int:
    """Binds it; its port. Raises CannotBind, which names `flag`.

    ZeroMQ binds no names. It is asked for any free port rather than for one that we draw: what `kvferry serve` holds
    for a child is then never taken.
    """
    try:
        listener.bind(str(numeric(where)))
    except (zmq.ZMQError, OSError) as error:
        why = error.strerror or error
        raise CannotBind(
            f"cannot listen at {where.address}: {why}; choose another {flag} on this machine"
        ) from error
    bound = listener.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    port = parse_endpoint(bound.rstrip(b"\0").decode()).port
    assert port is not None
    return port


def numeric(where: Endpoint) -> Endpoint:
    """With a number in place of a name: the first that the system knows. Raises OSError."""
    if where.on_every_address:
        return where
    found = socket.getaddrinfo(where.host, where.port or 0, type=socket.SOCK_STREAM)
    return Endpoint(_number(found[0][4]), where.port)


def address_towards(there: Endpoint) -> str:
    """The address of this machine from which `there` is reached. Raises CannotBind where no way leads there."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(there.host, there.port or 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(where)  # sends nothing: it only chooses the way
            return _number(asking.getsockname())
    except OSError as error:
        raise CannotBind(
            f"no way leads to {there}: {error.strerror or error}; wait for the network, or say with --advertise "
            "HOST:PORT where other workers reach this one"
        ) from error


def _number(where: tuple[object, ...]) -> str:
    return socket.getnameinfo(where, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]  # type: ignore[arg-type]
