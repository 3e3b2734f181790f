"""Addresses of sockets as people write them, `tcp://HOST:PORT` and `HOST:PORT`, IPv6 in brackets. Pure.

A host is an IPv4 or IPv6 address, a name, or, where one listens, `*`: every address of the machine. An IPv6 address
may bring a zone (`fe80::1%eth0`), which means something on one machine only.

Who listens on every address cannot say which of them another machine reaches. It says `tcp://*:PORT`, which whoever
is told reads as: the host at which you reached me.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

EVERY_ADDRESS = "*"

KEY_WANTED = (
    "is not on this machine's loopback: sockets between machines are encrypted. Make a key once with `kvferry keys new "
    "FILE`, bring it to every machine, and give each process --curve-key FILE"
)

_TEXT = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^\[\]:/\s]+|\*)):(?P<port>\d{1,5}|\*)")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`host` without brackets; `port` None: any free one."""

    host: str
    port: int | None

    def __str__(self) -> str:
        return f"tcp://{self.address}"

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{'*' if self.port is None else self.port}"

    @property
    def on_every_address(self) -> bool:
        return self.host == EVERY_ADDRESS or (is_numeric(self.host) and _number(self.host).is_unspecified)

    @property
    def has_zone(self) -> bool:
        return "%" in self.host

    def told(self) -> Endpoint:
        """What others may be told of an endpoint that is listened on."""
        return replace(self, host=EVERY_ADDRESS) if self.on_every_address or self.has_zone else self

    def reached_at(self, host: str) -> Endpoint:
        """Read by somebody who reaches the one that it belongs to at `host`."""
        return replace(self, host=host) if self.host == EVERY_ADDRESS else self


def parse_endpoint(text: str) -> Endpoint:
    """`tcp://HOST:PORT`. Raises ValueError, which says what is expected."""
    if not text.startswith("tcp://"):
        raise ValueError("expected tcp://HOST:PORT")
    return parse_address(text.removeprefix("tcp://"), "tcp://")


def parse_address(text: str, prefix: str = "") -> Endpoint:
    """`HOST:PORT`, or `HOST:*` for any free port. Raises ValueError, which says what is expected."""
    parts = _TEXT.fullmatch(text)
    if parts is None:
        six = f", with an IPv6 address in brackets: {prefix}[::1]:8701" if text.count(":") > 1 else ""
        raise ValueError(f"expected {prefix}HOST:PORT{six}")
    host = parts["six"] or parts["host"]
    if parts["six"] is not None and not (is_numeric(host) and _number(host).version == 6):
        raise ValueError(f"{host} is no IPv6 address")
    if parts["six"] is None and not (is_numeric(host) or host == EVERY_ADDRESS or _NAME.fullmatch(host)):
        raise ValueError(f"expected {prefix}HOST:PORT, and {host!r} is no host")
    port = None if parts["port"] == "*" else int(parts["port"])
    if port is not None and not 0 < port <= 65535:
        raise ValueError(f"expected {prefix}HOST:PORT with a port from 1 to 65535")
    return Endpoint(host, port)


def checked(name: str, text: str, parse: Callable[[str], Endpoint], *, keyed: bool) -> Endpoint:
    """The endpoint that a flag gives. Raises ValueError where it is none, or leaves this machine without a key."""
    try:
        endpoint = parse(text)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {error}") from None
    if not keyed and not is_loopback(endpoint.host):
        raise ValueError(f"{name} {text} {KEY_WANTED}")
    return endpoint


def is_numeric(host: str) -> bool:
    try:
        _number(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches; names other than localhost are not trusted."""
    host = host.removeprefix("[").removesuffix("]")
    return host == "localhost" or (is_numeric(host) and _number(host).is_loopback)


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)
