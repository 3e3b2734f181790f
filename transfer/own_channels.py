"""Which channels this worker has, by --transfer and by what its machine lets it have, in order of preference.

`auto` takes shm before tcp: it moves the same bytes with one copy less and no kernel buffers. Between pools on devices
it takes ipc before both: bytes stay on devices. What cannot be had is left out under `auto` and an error where it was
asked for by name. gloo and nccl come by name alone, for they speak with anybody (`common/transfer_settings.py`), and
torch is imported only where they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from common.counters import Counters
from common.errors import BadConfiguration
from common.messages import ChannelName, Sender
from kernels.shared_pool import CannotShare, PoolOnDevice
from transfer.channel import Pool, ReceivingEnd, SendingEnd
from transfer.ipc import ipc_receiving, ipc_sending
from transfer.segment import PoolSegment
from transfer.shm import shm_receiving, shm_sending
from transfer.tcp import TcpReceiving, TcpSending

log = logging.getLogger(__name__)

GROUPS: dict[str, ChannelName] = {"gloo": "gloo", "nccl": "nccl"}
"""Channels that are process groups."""


def require_channel(transfer: str, device: str) -> None:
    """Says before the model is loaded what is known against a channel. Raises BadConfiguration."""
    if transfer in GROUPS:
        from transfer import group_channels

        group_channels.require(transfer, device)


OnDevice = Callable[[], PoolOnDevice]
"""The pool of this worker, which is on a device. May raise CannotShare."""


def sending_ends(
    transfer: str, me: Sender, pool: Pool, segment: PoolSegment, on_device: OnDevice | None = None
) -> Sequence[SendingEnd]:
    """`segment` is what the pool was made in, if it was; `on_device` is there where it is not in the host's memory.
    Raises BadConfiguration."""
    if (group := GROUPS.get(transfer)) is not None:
        from transfer.group_channels import group_sending

        return [group_sending(group, me, pool, on_device is not None)]
    ends: list[SendingEnd] = []
    if transfer in ("auto", "ipc"):
        try:
            if on_device is not None:
                ends.append(ipc_sending(me, on_device(), pool.block_bytes))
            elif transfer == "ipc":
                raise CannotShare(_NOT_ON_A_DEVICE)
        except CannotShare as error:
            _without("ipc", transfer, error)
    if transfer in ("auto", "shm"):
        if segment.fd is not None:
            ends.append(shm_sending(me, pool, segment))
        else:
            _without("shm", transfer, segment.fault)
    if transfer in ("auto", "tcp"):
        ends.append(TcpSending(pool))
    return ends


def receiving_ends(
    transfer: str,
    me: Sender,
    counters: Counters,
    block_bytes: int,
    on_device: OnDevice | None = None,
    host: str = "127.0.0.1",
) -> Sequence[ReceivingEnd]:
    """`host`: where this worker listens. Raises BadConfiguration, CannotBind."""
    if (group := GROUPS.get(transfer)) is not None:
        from transfer.group_channels import group_receiving

        return [group_receiving(group, me, counters, block_bytes, host)]
    ends: list[ReceivingEnd] = []
    if transfer in ("auto", "ipc"):
        try:
            if on_device is not None:
                ends.append(ipc_receiving(me, counters, on_device(), block_bytes))
            elif transfer == "ipc":
                raise CannotShare(_NOT_ON_A_DEVICE)
        except (CannotShare, *_NO_DOOR) as error:
            _without("ipc", transfer, error)
    if transfer in ("auto", "shm"):
        try:
            ends.append(shm_receiving(me, counters, block_bytes))
        except _NO_DOOR as error:
            _without("shm", transfer, f"no Unix socket: {error}")
    if transfer in ("auto", "tcp"):
        ends.append(TcpReceiving())
    return ends


_NO_DOOR = (OSError, AttributeError)
"""A system without Unix sockets, or one that forbids them."""

_NOT_ON_A_DEVICE = "the pool is in this host's memory, and ipc is for pools on a GPU (--device cuda)"


def _without(channel: str, transfer: str, why: object) -> None:
    if transfer == channel:
        raise BadConfiguration(f"--transfer {channel} cannot be had: {why}; use auto or tcp")
    log.info("no %s here: %s", channel, why)
