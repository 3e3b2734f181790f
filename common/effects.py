"""What a pure object wants done: messages to send and frames to move, as data. Pure.

Objects return lists of these; the engine around them (or the virtual cluster of the tests) carries them out in
order. Nothing waits for an effect: whatever must be certain is asked for again by a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from common.messages import Message, PeerAddress
from common.request import FrontId, Key, WorkerId


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    message: Message


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Coordinator to a worker."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class ToFront:
    front: FrontId
    message: Message


@dataclass(frozen=True, slots=True)
class ToReceiver:
    """Prefill worker to the decode worker it sends KV to."""

    target: PeerAddress
    message: Message


@dataclass(frozen=True, slots=True)
class ToSender:
    """Decode worker back to the prefill worker that offered."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Ship pool block `block` as block `index` of the transfer `key`."""

    target: PeerAddress
    key: Key
    index: int
    block: int


Effect = ToCoordinator | ToWorker | ToFront | ToReceiver | ToSender | SendBlock
"""`ToWorker` and the answers to a front come from the coordinator only, the others from workers only."""


BLOCKS_AT_ONCE = 16
"""In one message. Waking for each costs both ends more than a block's bytes do; a message is read when all of it is
there, so that many more than keep both busy would only come later."""


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Some `SendBlock`, as they are carried out: of each its transfer, its index there, and its pool block."""

    target: PeerAddress
    blocks: list[tuple[Key, int, int]]


def gathered(effects: Iterable[Effect]) -> Iterator[Effect | SendBlocks]:
    """The same in the same order, blocks for one receiver that stand one after the other in one piece: so they can
    share a message."""
    for target, run in groupby(effects, key=lambda one: one.target if isinstance(one, SendBlock) else None):
        if target is None:
            yield from run
        else:
            yield SendBlocks(
                target, [(one.key, one.index, one.block) for one in run if isinstance(one, SendBlock)]
            )
