"""What a fuzz counts of the objects that it attacks: messages read and taken, sizes of tables, memory, descriptors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common.counters import Counters
from common.errors import ProtocolViolation
from common.messages import Message, Sender
from transfer.inbox import Inbox

OURS = ("common.", "coordinator.", "transfer.", "prefill_node.", "decode_node.", __name__)
BOUNDED = {
    "_violations": 10_000, "_shut_out_until": 10_000, "_highest": 8192, "_ended": 8192, "_last_seq": 4096,
    "_recent": 1024, "_passed_over": 8192, "ends": 32, "_faults": 256, "_addresses": 4096, "_ways": 256,
    "_early_stops": 8192, "notices": 256,
}  # fmt: skip
"""Tables that may fill up to their limit, which is named here and not looked up: it is part of the claim."""
OTHERS = 600  # entries of any other table at any time


class CountingInbox(Inbox):
    """`read_count` messages came to the door, `taken` of them went in."""

    all: list[CountingInbox] = []  # noqa: RUF012 - emptied by `counting`

    def __init__(self, counters: Counters) -> None:
        super().__init__(counters)
        self.counters = counters
        self.read_count = self.taken = 0
        self._reading = False
        CountingInbox.all.append(self)

    def read(
        self,
        data: bytes | memoryview,
        route: bytes = b"",
        kinds: tuple[type[Message], ...] = (Message,),
    ) -> tuple[Sender, Message] | None:
        self._reading = True
        read = super().read(data, route, kinds)
        self._reading = False
        self.read_count += 1
        self.taken += read is not None
        return read

    def violated(self, error: ProtocolViolation, route: bytes = b"") -> None:
        self.read_count += not self._reading  # of the wrong number of frames: never read
        super().violated(error, route)


@contextmanager
def counting() -> Iterator[None]:
    """Objects made inside have inboxes that count."""
    CountingInbox.all.clear()
    with (
        patch("transfer.links.Inbox", CountingInbox),
        patch("coordinator.control_plane.Inbox", CountingInbox),
    ):
        yield


def tables(root: object) -> dict[str, int]:
    """Every container that can be reached from `root` by attributes of objects of ours, by its path."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, deque)):
            found[path] = len(value)
            inside = list(value.values()) if isinstance(value, dict) else list(value)
            todo += [(f"{path}[]", one) for one in inside[:50]]
        elif type(value).__module__.startswith(OURS):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            todo += [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    return found


def overgrown(root: object) -> dict[str, int]:
    """Tables with more entries than they may have."""
    sizes = tables(root)
    return {p: n for p, n in sizes.items() if n > BOUNDED.get(p.rpartition(".")[2], OTHERS)}


def anonymous_bytes(pid: int | str = "self") -> int:
    """Of the process: what it has written that is no file's, in memory or swapped out (resident size hides that)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
