"""Settings of how KV blocks travel between workers."""

from __future__ import annotations

from typing import Literal

from common.endpoints import Endpoint, is_loopback
from common.flags import flag
from common.http_settings import Strict

Transfer = Literal["auto", "tcp", "shm", "ipc", "gloo", "nccl"]
SPEAK_WITH_ANYBODY: frozenset[Transfer] = frozenset({"gloo", "nccl"})


class TransferSettings(Strict):
    transfer: Transfer = flag(
        "auto",
        "how KV blocks travel; shm: the receiver reads the sender's memory, on one machine; ipc: its GPU reads the "
        "sender's (CUDA IPC; no GPU has run it yet); nccl: between GPUs, in a torch process group for every two "
        "workers (nor this; refused at start where torch has no NCCL or sees no GPU, as a CPU build of it); gloo: the "
        "same between CPUs; auto: ipc or shm where it can be, else tcp",
        "network",
    )
    trust_network: bool = flag(
        False,
        "let --transfer gloo and nccl leave loopback: they encrypt nothing and ask nobody who they are",
        "network",
    )

    def refuse_untrusted(self, name: str, where: Endpoint | None) -> None:
        """Raises ValueError where the flag `name` has workers meet off loopback without a word of trust. A key is
        none: it is of our sockets, and torch's groups know nothing of it."""
        if where is None or self.transfer not in SPEAK_WITH_ANYBODY or self.trust_network:
            return
        if not is_loopback(where.host):
            raise ValueError(
                f"--transfer {self.transfer} with {name} {where.address}: torch's process groups encrypt nothing and "
                "ask nobody who they are, whatever --curve-key says, so they stay on loopback. Say --trust-network "
                "where every machine of the network may read and write KV; else take --transfer tcp"
            )
