"""Every message that a worker sends or hears. Pure. `wire.py` makes bytes of them and back.

Those between front and coordinator are in `front_messages.py`, those that make a process group in `group_messages.py`.

Why dataclasses: the pure objects make and read tens of thousands a second in a simulation, where only what
arrives from a socket needs checking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from common.bounds import FEW, SHORT, Amount, Count, Endpoint, Index, Positive, Seconds, TokenId, Why, Word
from common.request import Attempt, Incarnation, Key, PackedIds, Request, RequestId, TokenLogprobs, WorkerId

Role = Literal["prefill", "decode"]
ChannelName = Literal["tcp", "shm", "ipc", "gloo", "nccl"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages."""


@dataclass(frozen=True, slots=True)
class AboutRequest(Message):
    """Anything about one try at one request."""

    id: Annotated[RequestId, SHORT]
    attempt: Attempt

    @property
    def key(self) -> Key:
        return (self.id, self.attempt)


@dataclass(frozen=True, slots=True)
class Sender:
    """Who a message comes from: the envelope's `from` and `inc`."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a decode worker takes transfers: its control ROUTER, its data socket, and the channels that blocks may
    take, each with where a sender finds its end ("" where the data socket is all it needs). `blocks_at_once`: how many
    one data message may hold; a worker of protocol 2.0 says nothing, and takes one. `one_header`: they may share a
    header (`Blocks`); a worker before 2.3 says nothing."""

    worker: Annotated[WorkerId, SHORT]
    incarnation: Incarnation
    control: Endpoint
    data: Endpoint
    channels: Annotated[dict[Word, Word], FEW] = field(default_factory=lambda: {"tcp": ""})
    blocks_at_once: Positive = 1
    one_header: bool = False


# ---------------------------------------------------------------- worker ↔ coordinator


@dataclass(frozen=True, slots=True)
class Register(Message):
    role: Role
    fingerprint: Annotated[dict[Word, Word | int | Amount | bool | None], FEW]
    address: PeerAddress
    channels: Annotated[tuple[Word, ...], FEW]
    blocks_total: Positive
    block_size: Positive
    block_bytes: Positive
    max_model_len: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    device: Word
    threads: Count
    pid: Count
    host: Word
    versions: Annotated[dict[Word, Word], FEW]
    whole_batches: bool = False  # it starts batches as a whole, so it must be given one before it starts any
    process_space: Word = ""  # where `pid` means this process (common/process_space.py)
    scheduling_policy: Word = ""  # by which it orders what it was given; empty: it does not say


@dataclass(frozen=True, slots=True)
class Registered(Message):
    max_model_len: Positive
    heartbeat_interval_s: Annotated[float, Field(ge=0.01, le=60)]
    fronts: Annotated[dict[Word, Endpoint], FEW]  # front id → endpoint of its token PULL


@dataclass(frozen=True, slots=True)
class RegistrationRefused(Message):
    field: Why
    ours: Why
    theirs: Why


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has on its hands. `step_s` is its smoothed time of one step; `step_model` says how long one takes
    by what stands in it (the coefficients of `step_times.py`), and nothing while too few steps are known."""

    running: Count
    waiting: Count
    queued_tokens: Count
    blocks_free: Count
    blocks_held: Count
    blocks_cached: Count
    step_s: Seconds
    step_model: tuple[()] | tuple[Seconds, Seconds, Seconds, Seconds] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    load: Load
    progress_age_s: Seconds  # since the model thread last finished something, 0 when it has nothing to do
    live: tuple[tuple[RequestId, Attempt, str], ...]
    last_seq: dict[str, Count]  # front id → sequence number of the last Tokens sent to it
    counters: dict[str, Amount]  # cumulative in this incarnation
    histograms: dict[str, tuple[Amount, ...]]  # name → (sum, count, count per bucket …)
    draining: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """`known` is false when the coordinator has no registration of this incarnation: register again."""

    known: bool
    abort: tuple[tuple[RequestId, Attempt], ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill(AboutRequest):
    """Compute prompt and `output_ids` (tokens of earlier attempts), sample the next token, hand over to `target`."""

    request: Request
    output_ids: PackedIds
    target: PeerAddress | None


@dataclass(frozen=True, slots=True)
class Decode(AboutRequest):
    """Prefill locally and decode: collocated serving, or the next attempt where no prefill worker is left."""

    request: Request
    output_ids: PackedIds


@dataclass(frozen=True, slots=True)
class Rebind(AboutRequest):
    target: PeerAddress


@dataclass(frozen=True, slots=True)
class Stop(AboutRequest):
    """The answer is complete (a stop string was found at the front): end as finished."""


@dataclass(frozen=True, slots=True)
class Abort(AboutRequest):
    reason: Why


@dataclass(frozen=True, slots=True)
class Started(AboutRequest):
    """The worker has begun: "prefilling" from whoever computes the first chunk, "decode_ready" from a decode
    worker that holds the verified KV and owns the request from now on."""

    phase: Word


@dataclass(frozen=True, slots=True)
class Ended(AboutRequest):
    """One worker's part in a request is over. Also the answer to `Stop` and `Abort`, with outcome "unknown" for
    ids it does not hold. `handed_over` says that the request goes on elsewhere. `lost_tokens`: computed for it, and of
    no more use if no other worker has them; of answers that came to their end, none."""

    outcome: Literal["finished", "aborted", "failed", "handed_over", "unknown"]
    reason: Why = ""
    phase: Word = ""
    durations_s: Annotated[dict[Word, Seconds], FEW] = field(default_factory=dict)
    cached_tokens: Count = 0
    blocks: Count = 0
    transferred_bytes: Count = 0
    retryable: bool = True
    lost_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class Drain(Message):
    deadline_s: Seconds


@dataclass(frozen=True, slots=True)
class SetRole(Message):
    role: Role
    deadline_s: Seconds


@dataclass(frozen=True, slots=True)
class Accepted(AboutRequest):
    """The worker holds it. `target` is where a prefill worker will hand it over: an answer to an older command
    shows by it, so the coordinator can tell whether its latest Rebind has arrived."""

    target: PeerAddress | None = None


@dataclass(frozen=True, slots=True)
class Later(AboutRequest):
    retry_after_s: Seconds


@dataclass(frozen=True, slots=True)
class Refused(AboutRequest):
    reason: Why


# ---------------------------------------------------------------- worker ↔ worker


@dataclass(frozen=True, slots=True)
class Offer(AboutRequest):
    """P asks D for room. `num_tokens` prompt tokens (earlier output included) will have KV; `hashes` are the
    16-byte prefix hashes of the complete blocks among them, one after the other."""

    request: Request
    output_ids: PackedIds
    num_tokens: Positive
    hashes: bytes
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Accept(AboutRequest):
    """D has room for the whole prompt; `wanted` are the block indices it does not hold already."""

    wanted: tuple[Count, ...]
    credit_bytes: Count


@dataclass(frozen=True, slots=True)
class Block(AboutRequest):
    """Header of a block on its way. Over tcp its bytes are the frame beside it, over shm and ipc they lie at `offset`
    of the sender's pool, over gloo and nccl they are the block of number `offset` in the stream between the two.
    `checksum`: XXH3, or over ipc the device's own (`kernels/block_hash.py`)."""

    index: Count
    part: Count
    checksum: int
    size: Count
    channel: ChannelName = "tcp"
    offset: Count = 0


BlockRow = tuple[Annotated[RequestId, SHORT], Attempt, Count, Count, int, Count, Count]
"""Of a `Block`: id, attempt, index, part, checksum, size, offset."""


@dataclass(frozen=True, slots=True)
class Blocks(Message):
    """One header for all blocks of a data message, over whose channel they come; a row is what `Block` says of one."""

    channel: ChannelName
    rows: Annotated[tuple[BlockRow, ...], FEW]


@dataclass(frozen=True, slots=True)
class Credit(AboutRequest):
    """Frames consumed (whatever became of them): their bytes are no longer in flight."""

    indices: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Nack(AboutRequest):
    indices: tuple[Count, ...]
    reason: Why


@dataclass(frozen=True, slots=True)
class Handover(AboutRequest):
    """The prompt is computed and its next token sampled: D may go on as soon as every block is there."""

    output_ids: PackedIds
    logprobs: TokenLogprobs | None
    num_blocks: Count
    cached_tokens: Count


@dataclass(frozen=True, slots=True)
class Delivered(AboutRequest):
    pass


@dataclass(frozen=True, slots=True)
class Revoke(AboutRequest):
    reason: Why


@dataclass(frozen=True, slots=True)
class Cancel(AboutRequest):
    reason: Why


@dataclass(frozen=True, slots=True)
class Cancelled(AboutRequest):
    pass


# ---------------------------------------------------------------- worker ↔ worker on one machine (transfer/door.py)


@dataclass(frozen=True, slots=True)
class ShownPool(Message):
    """Base of what P says when it shows D its pool, of `size` bytes in all: named, so that nobody else takes it."""

    worker: WorkerId
    incarnation: Incarnation
    size: Positive
    block_bytes: Positive


@dataclass(frozen=True, slots=True)
class Segment(ShownPool):
    """The pool's descriptor comes with this message."""


@dataclass(frozen=True, slots=True)
class DevicePool(ShownPool):
    """The pool lies on a device, `offset` bytes into the allocation that the driver opens by `handle`. `device`: what
    the driver calls it in every process (its UUID)."""

    handle: Annotated[bytes, Field(min_length=64, max_length=64)]
    offset: Count
    device: Annotated[bytes, Field(min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True)
class Mapped(Message):
    """D reads P's pool for as long as this connection stands."""


@dataclass(frozen=True, slots=True)
class NotMapped(Message):
    reason: Why


# ---------------------------------------------------------------- worker → front


@dataclass(slots=True)
class TokenRow:
    """Tokens of one request from output index `first` on. `finish` ends it. `cached_tokens`, in an attempt's first
    row, says how many prompt tokens came from a prefix cache.

    Not frozen: one is made for every token, and freezing triples what that costs."""

    id: RequestId
    attempt: Attempt
    first: Index
    ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: Count | None = None


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Log-probabilities of prompt tokens from index `first` on (the first token of all has none, so first >= 1)."""

    id: RequestId
    attempt: Attempt
    first: Positive
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """One step's tokens for one front. `seq` counts this worker's messages to it, so a lost one shows."""

    seq: Count
    rows: tuple[TokenRow, ...]
    prompts: tuple[PromptRow, ...] = ()
