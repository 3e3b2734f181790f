"""`gloo` and `nccl` put together: one pair of ends, two kinds of process group. Imported where one is asked for."""

from __future__ import annotations

import torch

from common.counters import Counters
from common.endpoints import EVERY_ADDRESS
from common.errors import BadConfiguration, CannotBind
from common.messages import ChannelName, Sender
from kernels.cache import PagedCache
from transfer.channel import Pool
from transfer.group_receiving import GroupReceiving
from transfer.group_sending import GroupSending, MakeGroup, copied_tensor, host_tensor
from transfer.process_group import GlooGroup, NcclGroup, why_no_gloo, why_no_nccl


def group_sending(name: ChannelName, me: Sender, pool: Pool, on_device: bool) -> GroupSending:
    """`on_device`: the pool is. Raises BadConfiguration."""
    if name == "gloo":
        return GroupSending(name, me, pool, GlooGroup, copied_tensor if on_device else host_tensor)
    if not isinstance(pool, PagedCache) or not on_device:
        raise cannot_be_had(name, "the model is on the CPU")
    return GroupSending(name, me, pool, _nccl(), lambda block, _: pool.device_block(block))


def group_receiving(
    name: ChannelName, me: Sender, counters: Counters, block_bytes: int, host: str
) -> GroupReceiving:
    """`host`: where it listens. Raises CannotBind."""
    make: MakeGroup = GlooGroup if name == "gloo" else _nccl()
    try:
        listens = "" if host == EVERY_ADDRESS else host
        return GroupReceiving(name, me, counters, block_bytes, listens, make)
    except OSError as error:
        raise CannotBind(f"{name} cannot listen at {host}: {error.strerror or error}") from error


def require(name: str, device: str) -> None:
    """To be asked before a model is loaded to `device` ("auto", "cpu", "cuda"). Raises BadConfiguration."""
    why = why_no_gloo() if name == "gloo" else why_no_nccl()
    if not why and name == "nccl" and device == "cpu":
        why = "it moves blocks between GPUs, and --device cpu was given"
    if why:
        raise cannot_be_had(name, why)


def cannot_be_had(name: str, why: str) -> BadConfiguration:
    return BadConfiguration(f"--transfer {name} cannot be had: {why}; use auto, shm or tcp")


def _nccl() -> MakeGroup:
    """On the GPU that this process's model is on."""
    device = torch.device("cuda", torch.cuda.current_device())
    return lambda store, rank, host, limit_s: NcclGroup(store, rank, device, limit_s)
