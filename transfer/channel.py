"""A channel: how the bytes of a block get from a sender's pool into a receiver's hands.

A header (`Block`) goes over the data socket in every case: which block, how long, its checksum, over which channel.
Blocks that leave together share a message (`data_messages.py`); each is a block as any other: the protocol above
(`sender.py`, `receiver.py`) knows each for itself as good, corrupt or doubled. What a channel adds is where the bytes
are: beside the header (`tcp`), in the sender's mapped pool (`shm`), in its pool on a device, which the receiver's
device reads (`ipc`), or in a process group of the two (`gloo`, `nccl`). The protocol sees none of this.

Which channel is a fact of two processes, not of a request: the sender tries its own in order of preference, those
that the receiver's address offers, and takes the first that opens (`way.py`). So no message about a request says it.

The contract, the same for all (tests/transfer/test_channels.py):
- The checksum is of the block as it was when it was packed. What is delivered may be something else (corrupted,
  or written over meanwhile): whoever takes it hashes its own copy, and that decides.
- A header is delivered at most once, with exactly its bytes or with none. They may be read during that call only.
- What came in one message is delivered in one call, or in several.
- Neither end waits for the other, and when one dies the other's descriptors and mappings are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import Block, ChannelName, PeerAddress, Sender
from common.request import Key
from kernels.shared_pool import SeenPool


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A block in another process's pool, which the own pool's device reads for itself: `block` of `pool`."""

    pool: SeenPool
    block: int
    size: int

    def __len__(self) -> int:
        return self.size


Source = memoryview | Elsewhere

Arrived = tuple[Block, Source]
"""A header and the bytes that came with it (none where there were none)."""

BlocksIn = Callable[[Sender, Sequence[Arrived]], None]
"""Who sent them, and what."""

HUNG_UP = "it hung up"
"""Why a way is lost whose peer's process has left, as it does in order too; its death is for others to tell."""

Outbound = tuple[Key, int, int]
"""A block on its way out: whose, which of them, and the pool block that holds it now."""

Frame = bytes | memoryview
"""What goes beside a header; it may be the pool's own memory, or a copy that the next `pack` overwrites: to be sent at
once."""


class Pool(Protocol):
    """What a channel needs of `kernels.cache.PagedCache`."""

    @property
    def block_bytes(self) -> int: ...
    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        """The pool's own memory, or a copy that stays until the next call."""
        ...

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> Sequence[int]:
        """Copies each source, as long as a block, into its block; the checksums of the copies."""
        ...


class SendingEnd(Protocol):
    """This worker's end towards those it sends to."""

    name: ChannelName

    def open(self, target: PeerAddress, opened: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Makes the way to `target`. Calls `opened` once blocks may go, or `failed` with the reason; `failed` may
        also come later, when the way is lost. Where one is open it stays, and whoever asked last is called."""
        ...

    def close(self, target: PeerAddress) -> None:
        """Nothing more goes there; no call comes any more. Idempotent."""
        ...

    def pack(self, target: PeerAddress, blocks: Sequence[Outbound]) -> list[tuple[Block, Frame]]:
        """Headers and frames that bring them to `target`."""
        ...

    async def end(self) -> None:
        """Closes everything, and waits for what is under way in threads."""
        ...


class ReceivingEnd(Protocol):
    """This worker's end towards those it receives from."""

    name: ChannelName
    where: str
    """How a sender finds it; "" where it needs nothing beside the data socket."""

    def start(self) -> None:
        """To be called inside the running event loop, once."""
        ...

    def take(self, sender: Sender, came: Sequence[Arrived], deliver: BlocksIn) -> None:
        """Headers came, each with its frame: delivers their blocks' bytes, now or when they are here."""
        ...

    async def end(self) -> None:
        """Closes everything, and waits for what is under way in threads."""
        ...


def store(pool: Pool, blocks: Sequence[tuple[int, Block, Source]]) -> list[bool]:
    """Copies each source into its pool block, and says of each whether the copy is what was packed. All are one
    sender's, and came over one channel.

    The copy is hashed, not the source: the source may be another process's memory, and change between two looks. A
    block that turns out wrong holds rubbish afterwards; it is reserved for this transfer, not delivered, not
    published, and is filled again or freed. So no pool block may stand here twice.
    """
    good = [False] * len(blocks)
    fits = [
        at for at, (_, header, source) in enumerate(blocks) if len(source) == header.size == pool.block_bytes
    ]
    found = _copy(pool, [blocks[at][0] for at in fits], [blocks[at][2] for at in fits])
    for at, checksum in zip(fits, found, strict=True):
        good[at] = checksum == blocks[at][1].checksum
    return good


def _copy(pool: Pool, blocks: Sequence[int], sources: Sequence[Source]) -> Sequence[int]:
    """The checksums of the copies, of the kind that this channel's are."""
    elsewhere = [source for source in sources if isinstance(source, Elsewhere)]
    if elsewhere:
        seen = elsewhere[0].pool
        assert len(elsewhere) == len(sources) and all(source.pool is seen for source in elsewhere)
        return seen.bring([source.block for source in elsewhere], blocks)
    return pool.write_blocks(blocks, [source for source in sources if isinstance(source, memoryview)])


def store_wanted(pool: Pool, came: Sequence[Arrived], place: Callable[[Block], int | None]) -> list[bool]:
    """Stores those that `place` has a pool block for. Of each that came, whether it is right: of what nobody waits for
    nothing else is known. Of several for one place the first is stored, and its verdict is theirs."""
    places = [place(header) for header, _ in came]
    first: dict[int, Arrived] = {}
    for block, one in zip(places, came, strict=True):
        if block is not None:
            first.setdefault(block, one)
    good = dict(zip(first, store(pool, [(block, *one) for block, one in first.items()]), strict=True))
    return [block is None or good[block] for block in places]
