"""ZMTP 3 as far as one who stands in the middle needs it: frames out of a byte stream, and back.

A connection begins with a greeting of 64 bytes from both sides and one READY command each (which may name the
identity of its socket); then come messages of one or more frames, and commands between them.
Source: https://rfc.zeromq.org/spec/23/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Frame:
    """`raw` is all of it as it came, `body` what it carries."""

    flags: int
    body: bytes
    raw: bytes

    @property
    def is_command(self) -> bool:
        return bool(self.flags & _COMMAND)

    @property
    def more(self) -> bool:
        return bool(self.flags & _MORE)


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Raises asyncio.IncompleteReadError at the end of the stream."""
    flags = (await reader.readexactly(1))[0]
    size = await reader.readexactly(8 if flags & _LONG else 1)
    body = await reader.readexactly(int.from_bytes(size, "big"))
    return Frame(flags, body, bytes([flags]) + size + body)


def pack(bodies: Sequence[bytes]) -> bytes:
    """One message of these frames."""
    return b"".join(_pack(body, more=index + 1 < len(bodies)) for index, body in enumerate(bodies))


def _pack(body: bytes, *, more: bool) -> bytes:
    if len(body) > 255:
        return bytes([more * _MORE | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([more * _MORE, len(body)]) + body


def identity(ready: bytes) -> str:
    """The name that a READY command gives its socket, "" where it gives none."""
    return dict(_properties(ready)).get("identity", b"").decode()


def _properties(ready: bytes) -> Iterator[tuple[str, bytes]]:
    at = 1 + ready[0]
    while at < len(ready):
        name_end = at + 1 + ready[at]
        value_at = name_end + 4
        end = value_at + int.from_bytes(ready[name_end:value_at], "big")
        yield ready[at + 1 : name_end].decode().lower(), ready[value_at:end]
        at = end
