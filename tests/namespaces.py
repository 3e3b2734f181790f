"""Two hosts on one machine: two network namespaces with a link between them, and this process in the first.

Whatever is started or connected from here is on the first host, unless it is said to be on the second.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

HOSTS = ("10.77.0.1", "10.77.0.2")
_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Names of the namespaces and of the two ends of the link."""

    names: tuple[str, str]
    links: tuple[str, str]

    def second(self, *command: str) -> list[str]:
        """The command, to be run on the second host."""
        return ["ip", "netns", "exec", self.names[1], *command]

    def cut(self) -> None:
        """At the second host's end: the first one would lose its own address with its end."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def join(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.links[1], "up")


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True, timeout=10)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Skips where the system lets this user make none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip`")
    hosts = TwoHosts(
        (f"kvferry-a{os.getpid()}", f"kvferry-b{os.getpid()}"), (f"kva{os.getpid()}", f"kvb{os.getpid()}")
    )
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        _take_away(hosts)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _ip("link", "add", hosts.links[0], "netns", hosts.names[0], "type", "veth",
            "peer", "name", hosts.links[1], "netns", hosts.names[1])  # fmt: skip
        for name, link, address in zip(hosts.names, hosts.links, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            for device in ("lo", link):
                _ip("-n", name, "link", "set", device, "up")
        _enter(f"/run/netns/{hosts.names[0]}")
        yield hosts
    finally:
        _enter(f"/proc/self/fd/{before}")
        os.close(before)
        _take_away(hosts)


def _enter(path: str) -> None:
    """This thread, and what it starts, is in that namespace from now on."""
    namespace = os.open(path, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.setns(namespace, _CLONE_NEWNET)
    os.close(namespace)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")


def _take_away(hosts: TwoHosts) -> None:
    for name in hosts.names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


class Eavesdropper:
    """Reads every packet of a device of this host, as anybody on the way could."""

    def __init__(self, device: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind((device, 0))
        self._socket.setblocking(False)

    def heard(self) -> bytes:
        """All packets since it was last asked."""
        packets: list[bytes] = []
        try:
            while True:
                packets.append(self._socket.recv(1 << 17))
        except BlockingIOError:
            return b"".join(packets)

    def close(self) -> None:
        self._socket.close()
