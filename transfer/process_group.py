"""A process group of two over which blocks flow from rank 1 to rank 0: gloo between CPUs, NCCL between GPUs.

Made directly and not by `init_process_group`, which knows one world for the life of a process: here workers come and
go, so every two have a group of their own (`rendezvous.py`). The two differ in how a wait can end:
  - A call into gloo ends when the bytes have moved, when the peer's end of the group is gone, or after its timeout, and
    nothing else ends it. After a timeout the group is of no use. (torch 2.13: `is_completed` of what was sent says
    nothing, and `abort` does nothing.)
  - NCCL's calls only put work on a stream. Whoever waits looks at it now and then, and can abort the communicator.
So one thread has a group, makes it, waits in it and drops it, and nothing else waits for that thread.

NCCL refuses two ranks on one device, and no machine with two GPUs was at hand: that half has not run anywhere yet.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed
from torch.distributed import ProcessGroupGloo

from transfer.rendezvous import PairStore

MOVE_LIMIT_S = 5.0
"""For the blocks of one message. As long as a worker may be silent before it counts as lost (--worker-timeout)."""

CONNECT_LIMIT_S = 1.0
"""Once both have said where they are: gloo tries five times as long (torch 2.13). It takes 2 ms."""

RECEIVER, SENDER = 0, 1
_SIZE = 2
_TAG = 0  # one for all: of one tag, what was sent first arrives first, in both kinds of group
_LEAST = timedelta(milliseconds=1)  # torch takes 0 for "no limit"
_LOOK_S = 50e-6
_LENGTH = struct.Struct("=Q")
_ADDRESS_BYTES = 128 + 8  # sockaddr_storage, and a number of gloo's own


class GroupLost(Exception):
    """The group is of no use any more; the message says why."""


class Group(Protocol):
    """`stopped`: asked during a wait that can be given up, whether it should be."""

    def buffer(self, rows: int, row_bytes: int) -> torch.Tensor:
        """uint8 `[rows, row_bytes]` of this host's memory, to receive into."""
        ...

    def send(self, blocks: Sequence[torch.Tensor], stopped: Callable[[], bool]) -> None:
        """Each uint8 `[row_bytes]`. Until all have left, MOVE_LIMIT_S at most. Raises RuntimeError."""
        ...

    def receive(self, into: torch.Tensor, stopped: Callable[[], bool]) -> None:
        """As many as `into` has rows, in the order in which they were sent; limit and errors are those of `send`."""
        ...

    def end(self) -> None:
        """Nothing waits any more. From the thread that made it."""
        ...


class _TorchGroup(Protocol):
    """What is used of torch's classes, whose stubs do not say it."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> torch.distributed.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> torch.distributed.Work: ...
    def abort(self) -> None: ...


class GlooGroup:
    """`host`: this machine's address that leads to the peer. Raises RuntimeError where there is no peer in time."""

    def __init__(self, store: PairStore, rank: int, host: str, limit_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub knows only its public name
        options._timeout = timedelta(seconds=min(limit_s, CONNECT_LIMIT_S))
        options._threads = 1  # for collectives, which nobody calls
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        store.readable = is_address
        self._store = store  # torch holds the C++ half of it alone, and may call it
        self._group = cast(_TorchGroup, ProcessGroupGloo(store, rank, _SIZE, options))
        self._peer = 1 - rank

    def buffer(self, rows: int, row_bytes: int) -> torch.Tensor:
        return torch.zeros((rows, row_bytes), dtype=torch.uint8)  # touched now, not amid the first transfer

    def send(self, blocks: Sequence[torch.Tensor], stopped: Callable[[], bool]) -> None:
        self._wait([self._group.send([block], self._peer, _TAG) for block in blocks])

    def receive(self, into: torch.Tensor, stopped: Callable[[], bool]) -> None:
        self._wait([self._group.recv([row], self._peer, _TAG) for row in into])

    def _wait(self, works: Sequence[torch.distributed.Work]) -> None:
        deadline = time.monotonic() + MOVE_LIMIT_S
        for work in works:
            work.wait(max(_LEAST, timedelta(seconds=deadline - time.monotonic())))

    def end(self) -> None:
        """It ends when nobody refers to it any more; so do the peer's waits."""


class NcclGroup:
    """Between two GPUs, by a stream of its own beside the steps'. Raises RuntimeError where there is no peer in time.

    Its blocks lie on the device. The receiver gets them into staging there and from there into pinned memory of the
    host, where they are hashed as over every other channel.
    """

    def __init__(self, store: PairStore, rank: int, device: torch.device, limit_s: float) -> None:
        _let_the_process_live()
        torch.cuda.set_device(device)
        group = torch.distributed.ProcessGroupNCCL
        options = group.Options()
        options._timeout = timedelta(seconds=limit_s)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._store = store  # torch holds the C++ half of it alone, and may call it
        self._group = cast(_TorchGroup, group(store, rank, _SIZE, options))
        self._peer = 1 - rank
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._first_byte(rank, limit_s)

    def _first_byte(self, rank: int, limit_s: float) -> None:
        """The first that travels makes the communicator, which waits for the peer: now, and not amid a transfer. (In
        there NCCL waits without asking us: a peer that is stopped just then holds this one thread until it ends.)"""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        with torch.cuda.stream(self._stream):
            move = self._group.send if rank == SENDER else self._group.recv
            self._wait([move([byte], self._peer, _TAG)], lambda: False, limit_s)

    def buffer(self, rows: int, row_bytes: int) -> torch.Tensor:
        self._staging = torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device)
        return torch.zeros((rows, row_bytes), dtype=torch.uint8).pin_memory()

    def send(self, blocks: Sequence[torch.Tensor], stopped: Callable[[], bool]) -> None:
        with torch.cuda.stream(self._stream):
            self._wait([self._group.send([block], self._peer, _TAG) for block in blocks], stopped)

    def receive(self, into: torch.Tensor, stopped: Callable[[], bool]) -> None:
        with torch.cuda.stream(self._stream):
            rows = self._staging[: len(into)]
            self._wait([self._group.recv([row], self._peer, _TAG) for row in rows], stopped)
            into.copy_(rows, non_blocking=True)
            self._stream.synchronize()

    def _wait(
        self,
        works: Sequence[torch.distributed.Work],
        stopped: Callable[[], bool],
        limit_s: float = MOVE_LIMIT_S,
    ) -> None:
        deadline = time.monotonic() + limit_s
        for work in works:
            while not work.is_completed():
                if stopped() or time.monotonic() >= deadline:
                    self._group.abort()  # else the kernel spins for ever
                    raise GroupLost("given up" if stopped() else f"nothing moved for {limit_s:g} s")
                time.sleep(_LOOK_S)
            work.wait()  # raises what became of it

    def end(self) -> None:
        self._group.abort()


def is_address(value: bytes) -> bool:
    """Whether gloo can read what a peer has published: a name and an address, each behind its length, and a number for
    each process. It looks at no length itself: of half an address it read on, and this process was gone."""
    name_end = _LENGTH.size + _length_at(value, 0)
    start = name_end + _LENGTH.size
    if _length_at(value, name_end) != _ADDRESS_BYTES or len(value) != start + _ADDRESS_BYTES + 8 * _SIZE:
        return False
    return int.from_bytes(value[start : start + 2], sys.byteorder) in (socket.AF_INET, socket.AF_INET6)


def _length_at(value: bytes, at: int) -> int:
    """-1 where it ends before."""
    found: int = _LENGTH.unpack_from(value, at)[0] if 0 <= at <= len(value) - _LENGTH.size else -1
    return found


def why_no_nccl() -> str:
    """ "" where NCCL can be had."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL"
    return "" if torch.cuda.is_available() else "torch sees no GPU here"


def why_no_gloo() -> str:
    """ "" where gloo can be had."""
    available = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return "" if available else "this build of torch has no gloo"


def _let_the_process_live() -> None:
    """By default torch's watchdog ends the whole process when an operation fails or takes long. Here that is one peer's
    death, which this process is to survive. It reads the environment when a group is made."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
