"""What garbage looks like: a valid message with one thing or a few things wrong, or no message at all."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

import msgpack

from common.wire import PROTOCOL_MAJOR, TYPES


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63),
    float("nan"), float("inf"), float("-inf"), 1e308, -0.0, 5e-324, "", "x", "x" * 3000, "\x00", "é" * 300, "../../x",
    "ipc:///tmp/x", "tcp://*:0", "tcp://127.0.0.1:99999", "inproc://x", "tcp://:1", b"", b"\xff" * 64, b"\x00" * 4000,
    b"abc", [], {}, [[]], [1] * 3000, ["x"] * 500, list(range(-50, 50)), {"a": {"b": {}}},
    {str(n): n for n in range(500)}, [None], [float("nan")], [-1], [1 << 63], _deep(60), _deep(200),
)  # fmt: skip

_OURS = PROTOCOL_MAJOR
_VERSIONS: tuple[Any, ...] = (
    [_OURS + 1, 0], [0, 9], [_OURS], [_OURS, 99], _OURS, [_OURS, None], [[_OURS], 0]
)  # fmt: skip


class Mutator:
    """`names` are words to put where others stand: of peers, of live requests."""

    def __init__(self, random: Random, names: Sequence[str], incarnations: Sequence[int]) -> None:
        self._random = random
        self._names = names
        self._incarnations = incarnations

    def mutate(self, packed: bytes) -> bytes:
        """Somewhere between the message as it is and noise."""
        kind = self._random.randrange(10)
        if kind == 0:
            return packed
        if kind == 1:
            return self._random.randbytes(self._random.choice((0, 1, 2, 8, 60, 300)))
        if kind <= 3:
            return self._bytes_wrong(bytearray(packed))
        body = msgpack.unpackb(packed)
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            self._wrong(body)
        return bytes(msgpack.packb(body))

    def _bytes_wrong(self, data: bytearray) -> bytes:
        random = self._random
        for _ in range(random.choice((1, 1, 3, 10))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        cut = random.randrange(len(data)) if random.random() < 0.3 else len(data)
        return bytes(data[:cut]) + (random.randbytes(5) if random.random() < 0.1 else b"")

    def _wrong(self, body: dict[str, Any]) -> None:
        random = self._random
        how = random.randrange(8)
        if how == 0:
            body.pop(random.choice(list(body)), None)
        elif how == 1:
            body[random.choice(("colour", "v2", "", "__class__"))] = self._hostile()
        elif how == 2:
            body["t"] = random.choice([*TYPES, "AboutRequest", 5, None])
        elif how == 3:
            body["v"] = random.choice(_VERSIONS)
        elif how == 4:
            body["from"], body["inc"] = random.choice(self._names), random.choice(self._incarnations)
        else:
            self._field_wrong(body)

    def _field_wrong(self, body: Any) -> None:
        """Walks down at random and replaces what it finds there."""
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        if not keys:
            return
        key = self._random.choice(keys)
        if isinstance(body[key], (dict, list)) and body[key] and self._random.random() < 0.7:
            self._field_wrong(body[key])
        else:
            body[key] = self._hostile()

    def _hostile(self) -> Any:
        if self._random.random() < 0.1:
            return self._random.choice(self._names)
        return deepcopy(self._random.choice(HOSTILE))  # what is put in may be mutated again

    def frames(self, data: bytes) -> list[bytes]:
        """Mostly one; now and then another number than belongs there."""
        if self._random.random() < 0.03:
            return [b""] * self._random.choice((0, 1, 2, 30)) + [data, self._random.randbytes(3)]
        return [data]
