"""One worker in virtual time: its production objects, its size, and what its pool's blocks hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.virtual_model import VirtualModel
from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.messages import PeerAddress, Register, Role, Sender
from common.ordering import POLICIES, PolicyName
from common.request import Incarnation, WorkerId
from common.roles import id_in_other_role, other_role
from decode_node.forming import RequestLevel
from decode_node.worker import DecodeWorker
from prefill_node.worker import PrefillWorker
from transfer.receiver import TransferReceiver
from transfer.sender import TransferSender

BLOCK_BYTES = 1000
WINDOW_BYTES = 8 * BLOCK_BYTES
FINGERPRINT = "virtual"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: base + per row + per token, and per token of context before those."""

    base_s: float = 0.008
    row_s: float = 0.0005
    token_s: float = 0.0003
    context_s: float = 0.0

    def seconds(self, batch: Batch) -> float:
        steps_s = self.base_s + self.row_s * len(batch.rows) + self.token_s * batch.num_tokens
        return steps_s + self.context_s * sum(batch.starts) if self.context_s else steps_s


@dataclass(frozen=True, slots=True)
class Shape:
    """One worker's size, and how its batches form: `batch_timeout_s` makes it one of whole batches. `max_inflight` is a
    decode worker's: batches that may be out at a time."""

    num_blocks: int = 256
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    prefix_caching: bool = True
    batch_timeout_s: float | None = None
    max_inflight: int = 1
    policy: PolicyName = "fair"


class VirtualWorker:
    """To be overridden by workers that compute something else. Its loop is `virtual_loop.py`."""

    def __init__(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> None:
        self.name = WorkerId(name)
        self.role: Role = role
        self.shape = shape
        self.step_time = step_time
        self.incarnation = Incarnation(0)
        self.start()

    def start(self) -> None:
        """A new life: empty pool, new incarnation."""
        shape = self.shape
        self.incarnation = Incarnation(self.incarnation + 1)
        self.pool = BlockPool(shape.num_blocks)
        self.core = BatchingCore(
            self.pool,
            block_size=shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            prefix_caching=shape.prefix_caching,
            fingerprint=FINGERPRINT,
        )
        self.model = VirtualModel(
            num_blocks=shape.num_blocks, block_size=shape.block_size, max_num_seqs=shape.max_num_seqs
        )
        self.node: PrefillWorker | DecodeWorker
        self.transfers: TransferSender | TransferReceiver
        if self.role == "prefill":
            self.transfers = TransferSender(block_bytes=BLOCK_BYTES, window_bytes=WINDOW_BYTES)
            self.node = PrefillWorker(
                self.core,
                self.transfers,
                fingerprint=FINGERPRINT,
                block_bytes=BLOCK_BYTES,
                policy=POLICIES[shape.policy],
            )
        else:
            self.transfers = TransferReceiver(block_bytes=BLOCK_BYTES)
            timeout_s = shape.batch_timeout_s
            self.node = DecodeWorker(
                self.core,
                self.transfers,
                fingerprint=FINGERPRINT,
                block_bytes=BLOCK_BYTES,
                forming=None if timeout_s is None else RequestLevel(shape.max_num_seqs, timeout_s),
                max_inflight=shape.max_inflight,
                policy=POLICIES[shape.policy],
            )

    def change_role(self) -> None:
        """Between two lives."""
        self.name = WorkerId(id_in_other_role(self.name, self.role))
        self.role = other_role(self.role)

    @property
    def max_inflight(self) -> int:
        return self.shape.max_inflight if self.role == "decode" else 1

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.name, self.incarnation, f"virtual://{self.name}", f"virtual://{self.name}")

    @property
    def sender(self) -> Sender:
        return Sender(self.name, self.incarnation)

    def card(self) -> Register:
        shape = self.shape
        return Register(
            role=self.role,
            fingerprint={"model": FINGERPRINT},
            address=self.address,
            channels=("tcp",),
            blocks_total=shape.num_blocks,
            block_size=shape.block_size,
            block_bytes=BLOCK_BYTES,
            max_model_len=shape.num_blocks * shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            device="virtual",
            threads=1,
            pid=0,
            host="virtual",
            versions={},
            whole_batches=shape.batch_timeout_s is not None,
        )

    def compute(self, batch: Batch) -> Sequence[RowResult]:
        """One step of this worker's model."""
        return self.model.run(batch)

    def read_block(self, block: int) -> object:
        """A copy of what the block holds: what goes on the wire."""
        return list(self.model.content[block])

    def write_block(self, block: int, content: object) -> None:
        assert isinstance(content, list)
        self.model.content[block] = list(content)

    def damaged(self, content: object) -> object:
        """What became of it on the way."""
        assert isinstance(content, list)
        return [token ^ 1 for token in content]

    def check_idle(self) -> None:
        """Asserts that nothing is left here of anything."""
        self.pool.check()
        assert self.node.idle, f"{self.name} is busy with {self.node.live_keys()}"
        assert self.pool.held == 0, f"{self.name} holds {self.pool.held} blocks"
        assert self.core.free_slots == self.shape.max_num_seqs, f"{self.name} lacks slots"
        assert self.transfers.settled, f"{self.name} has a transfer open"
