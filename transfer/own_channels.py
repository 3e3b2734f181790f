"""Which channels this worker has, by --transfer and by what its machine lets it have, in order of preference.

`auto` takes shm before tcp: it moves the same bytes with one copy less and no kernel buffers. What cannot be had is
left out under `auto` and an error where it was asked for by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.counters import Counters
from common.errors import BadConfiguration
from common.messages import Sender
from transfer.channel import Pool, ReceivingEnd, SendingEnd
from transfer.segment import PoolSegment
from transfer.shm import shm_receiving, shm_sending
from transfer.tcp import TcpReceiving, TcpSending

log = logging.getLogger(__name__)


def sending_ends(
    transfer: str, me: Sender, pool: Pool, segment: PoolSegment
) -> Sequence[SendingEnd]:
    """`segment` is what the pool was made in, if it was. Raises BadConfiguration."""
    ends: list[SendingEnd] = []
    if transfer != "tcp":
        if segment.fd is not None:
            ends.append(shm_sending(me, pool, segment))
        else:
            _without_shm(transfer, segment.fault)
    if transfer != "shm":
        ends.append(TcpSending(pool))
    return ends


def receiving_ends(transfer: str, me: Sender, counters: Counters, block_bytes: int) -> Sequence[ReceivingEnd]:
    """Raises BadConfiguration."""
    ends: list[ReceivingEnd] = []
    if transfer != "tcp":
        try:
            ends.append(shm_receiving(me, counters, block_bytes))
        except (OSError, AttributeError) as error:  # a system without such sockets, or one that forbids them
            _without_shm(transfer, f"no Unix socket: {error}")
    if transfer != "shm":
        ends.append(TcpReceiving())
    return ends


def _without_shm(transfer: str, why: str) -> None:
    if transfer == "shm":
        raise BadConfiguration(f"--transfer shm cannot be had: {why}; use auto or tcp")
    log.info("no shm here: %s", why)
