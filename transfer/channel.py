"""A channel: how the bytes of a block get from a sender's pool into a receiver's hands.

A header (`Block`) goes over the data socket in every case: which block, how long, its checksum, over which channel.
What a channel adds is where the bytes are: beside the header (`tcp`), in the sender's mapped pool (`shm`), and later
in a buffer on a device. The protocol above (`sender.py`, `receiver.py`) sees none of this.

Which channel is a fact of two processes, not of a request: the sender tries its own in order of preference, those
that the receiver's address offers, and takes the first that opens (`way.py`). So no message about a request says it.

The contract, the same for all (tests/transfer/test_channels.py):
- The checksum is of the block as it was when it was packed. What is delivered may be something else (corrupted,
  or written over meanwhile): whoever takes it hashes its own copy, and that decides.
- A header is delivered at most once, with exactly its bytes or with none. They may be read during that call only.
- Neither end waits for the other, and when one dies the other's descriptors and mappings are closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.messages import Block, ChannelName, PeerAddress, Sender
from common.request import Key
from kernels.block_bytes import checksums, copy_blocks

BlockIn = Callable[[Block, Sender, memoryview], None]
"""A header, who sent it, and the bytes that came with it (none where there were none)."""

HUNG_UP = "it hung up"
"""Why a way is lost whose peer's process has left, as it does in order too; its death is for others to tell."""

Frame = bytes | memoryview
"""What goes beside a header; it may be the pool's own memory, so it is to be sent at once."""


class Pool(Protocol):
    """What a channel needs of `kernels.cache.PagedCache`."""

    def block_bytes_view(self, block: int) -> memoryview: ...
    def host_block(self, block: int) -> memoryview | None: ...
    def write_block(self, block: int, data: memoryview) -> None: ...


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

    def pack(self, target: PeerAddress, key: Key, index: int, block: int) -> tuple[Block, Frame]:
        """Header and frame that bring pool block `block` to `target` as block `index` of `key`."""
        ...

    def end(self) -> None:
        """Closes everything."""
        ...


class ReceivingEnd(Protocol):
    """This worker's end towards those it receives from."""

    name: ChannelName
    where: str
    """How a sender finds it; "" where it needs nothing beside the data socket."""

    def start(self) -> None:
        """To be called inside the running event loop, once."""
        ...

    def take(self, header: Block, sender: Sender, frame: memoryview, deliver: BlockIn) -> None:
        """A header came: delivers its block's bytes, now or when they are here."""
        ...

    def end(self) -> None:
        """Closes everything."""
        ...


def store(pool: Pool, block: int, source: memoryview, header: Block) -> bool:
    """Copies `source` into the pool block and says whether the copy is what was packed.

    The copy is hashed, not the source: the source may be another process's memory, and change between two looks. A
    block that turns out wrong holds rubbish afterwards; it is reserved for this transfer, not delivered, not
    published, and is filled again or freed.
    """
    if len(source) != header.size:
        return False
    own = pool.host_block(block)
    if own is None:  # a device's pool: checked before it goes there
        copy = bytes(source)
        good = checksums([copy])[0] == header.checksum
        if good:
            pool.write_block(block, memoryview(copy))
        return good
    if len(own) != header.size:
        return False
    return copy_blocks([own], [source])[0] == header.checksum
