"""A decode worker of four slots and 256 blocks with a virtual model, and requests for it, for what drives a worker."""

from __future__ import annotations

from bench.virtual_model import VirtualModel
from common.batching import BatchingCore
from common.blocks import BlockPool
from common.messages import Decode
from common.request import Attempt, FrontId, Request, RequestId, SamplingParams, pack_ids
from decode_node.worker import DecodeWorker
from transfer.receiver import TransferReceiver

LIMIT_S = 5.0


class SmallWorker:
    def __init__(self, max_inflight: int = 1) -> None:
        core = BatchingCore(
            BlockPool(256),
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefix_caching=False,
            fingerprint="f",
        )
        self.pool = core.pool
        self.model = VirtualModel(num_blocks=256, block_size=16, max_num_seqs=4)
        self.node = DecodeWorker(
            core,
            TransferReceiver(block_bytes=100),
            fingerprint="f",
            block_bytes=100,
            max_inflight=max_inflight,
        )


def decode_of(name: str, max_tokens: int) -> Decode:
    """A prompt of twenty tokens."""
    request = Request(
        RequestId(name), pack_ids(range(20)), SamplingParams(max_tokens=max_tokens), FrontId("f")
    )
    return Decode(request.request_id, Attempt(1), request, b"")
