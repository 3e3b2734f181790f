"""A whole cluster in virtual time: the production objects, driven by an event heap instead of sockets. Pure.

Schedulers, workers, transfer, front and coordinator are the very objects that serve; only bytes, clocks and the
model are replaced (see virtual_model.py), and a step takes the time that `StepTime` says. A run is a function of
its seed: the same seed gives the same tokens at the same times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.virtual_model import Row as Row, VirtualModel
from common.batching import Batch, BatchingCore, RowResult
from common.blocks import BlockPool
from common.effects import Effect, SendBlock, ToCoordinator, ToFront, ToReceiver, ToSender, ToWorker
from common.messages import (
    Admitted,
    Block,
    CancelRequest,
    HeartbeatAck,
    Message,
    PeerAddress,
    Register,
    Registered,
    Rejected,
    RequestEnded,
    Role,
    Sender,
    Submit,
    Tokens,
)
from common.request import (
    FrontId,
    Incarnation,
    Request,
    RequestId,
    TokenLogprobs,
    WorkerId,
    first_attempt_of_epoch,
)
from coordinator.cluster import Cluster
from coordinator.front import Front
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from decode_node.worker import DecodeWorker
from prefill_node.worker import PrefillWorker
from transfer.receiver import TransferReceiver
from transfer.sender import TransferSender

FRONT = FrontId("front")
HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances, per message or frame, of the network."""

    lose: float = 0.0
    double: float = 0.0
    delay_s: tuple[float, float] = (0.0001, 0.0005)
    corrupt: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: base + per row + per token."""

    base_s: float = 0.008
    row_s: float = 0.0005
    token_s: float = 0.0003

    def seconds(self, batch: Batch) -> float:
        return self.base_s + self.row_s * len(batch.rows) + self.token_s * batch.num_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """One worker's size."""

    num_blocks: int = 256
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    prefix_caching: bool = True


@dataclass(slots=True)
class Answer:
    """What a client got."""

    submitted: float
    group: tuple[RequestId, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    end: str | None = None  # finish reason, or the error's name, or "left"


class VirtualWorker:
    """One worker, its pool's contents, and whether a step is out."""

    def __init__(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> None:
        self.name = WorkerId(name)
        self.role: Role = role
        self.shape = shape
        self.step_time = step_time
        self.incarnation = Incarnation(0)
        self.alive = False
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
            fingerprint="virtual",
        )
        self.model = VirtualModel(
            num_blocks=shape.num_blocks, block_size=shape.block_size, max_num_seqs=shape.max_num_seqs
        )
        self.node: PrefillWorker | DecodeWorker
        if self.role == "prefill":
            self.transfers: TransferSender | TransferReceiver = TransferSender(
                block_bytes=1000, window_bytes=8000
            )
            self.node = PrefillWorker(self.core, self.transfers, fingerprint="virtual", block_bytes=1000)
        else:
            self.transfers = TransferReceiver(block_bytes=1000)
            self.node = DecodeWorker(self.core, self.transfers, fingerprint="virtual", block_bytes=1000)
        self.busy = False
        self.registered = False
        self.alive = True
        self.timer: float | None = None
        self.late_step: Callable[[], None] | None = None  # came back while frozen

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
            fingerprint={"model": "virtual"},
            address=self.address,
            channels=("tcp",),
            blocks_total=shape.num_blocks,
            block_size=shape.block_size,
            block_bytes=1000,
            max_model_len=shape.num_blocks * shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            device="virtual",
            threads=1,
            pid=0,
            host="virtual",
            versions={},
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


class VirtualCluster:
    def __init__(
        self,
        *,
        seed: int,
        num_prefill: int,
        num_decode: int,
        prefill_shape: Shape | None = None,
        decode_shape: Shape | None = None,
        step_time: StepTime | None = None,
        faults: Faults | None = None,
        max_queue: int = 100_000,
    ) -> None:
        self.now = 0.0
        self.faults = faults or Faults()
        self.random = Random(seed)
        self.answers: dict[RequestId, Answer] = {}
        self.front = Front()
        self._max_queue = max_queue
        self._epoch = 0
        self.cluster = self._new_coordinator()
        shapes = {"prefill": prefill_shape or Shape(), "decode": decode_shape or Shape()}
        names: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(num_prefill)]
        names += [(f"decode-{i}", "decode") for i in range(num_decode)]
        self.workers = {
            WorkerId(name): self.make_worker(name, role, shapes[role], step_time or StepTime())
            for name, role in names
        }
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._coordinator_timer = float("inf")
        for worker in self.workers.values():
            self._boot(worker)

    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> VirtualWorker:
        """To be overridden by a cluster whose workers compute something else."""
        return VirtualWorker(name, role, shape, step_time)

    def _new_coordinator(self) -> Cluster:
        self._epoch += 1
        return Cluster(
            Registry(
                tokenizer_hash=None, fronts={FRONT: "virtual://front"}, heartbeat_interval_s=HEARTBEAT_S
            ),
            WaitingQueue(max_requests=self._max_queue, max_tokens=1 << 40),
            first_attempt=first_attempt_of_epoch(self._epoch),
        )

    # ------------------------------------------------------------ what a user of this does

    def submit(self, request: Request, deadline_s: float | None = None) -> Answer:
        return self.submit_group([request], deadline_s)[0]

    def submit_group(self, requests: Sequence[Request], deadline_s: float | None = None) -> list[Answer]:
        """What one client asks for at once: an answer for each, and if one fails the others are cancelled."""
        group = tuple(request.request_id for request in requests)
        answers = [Answer(self.now, group) for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.answers[request.request_id] = answer
            self.front.open(request.request_id, request.scored_prompt_tokens)
        self._coordinator(self.cluster.submit(Submit(tuple(requests), deadline_s), self.now))
        return answers

    def leave(self, request_id: RequestId, end: str = "left") -> None:
        """The client goes away, and with it all that it asked for."""
        for other in self.answers[request_id].group:
            answer = self.answers[other]
            if answer.end is None:
                answer.end = end
                self.front.close(other)
                self._coordinator(self.cluster.from_front(CancelRequest(other, "client left"), self.now))

    def kill(self, name: str) -> None:
        self.workers[WorkerId(name)].alive = False

    def restart(self, name: str) -> None:
        worker = self.workers[WorkerId(name)]
        worker.start()
        self._boot(worker)

    def freeze(self, name: str) -> None:
        """The process stands still: what is sent to it meanwhile is lost, and a step that is out comes back late."""
        self.workers[WorkerId(name)].alive = False

    def thaw(self, name: str) -> None:
        worker = self.workers[WorkerId(name)]
        worker.alive = True
        if worker.late_step is not None:
            self.at(self.now, worker.late_step)
            worker.late_step = None
        self._beat(worker, worker.incarnation)
        worker.timer = None
        self._turn(worker)

    def restart_coordinator(self) -> None:
        """Coordinator and front are one process: its requests are gone, the workers are not told."""
        for request_id, answer in self.answers.items():
            if answer.end is None:
                answer.end = "coordinator lost"
                self.front.close(request_id)
        self.cluster = self._new_coordinator()

    def check_idle(self) -> None:
        """Asserts that nothing is left of anything anywhere."""
        assert self.cluster.settled and len(self.front) == 0, "the coordinator holds something"
        for worker in self.workers.values():
            if worker.alive:
                worker.pool.check()
                assert worker.node.idle, f"{worker.name} is busy with {worker.node.live_keys()}"
                assert worker.pool.held == 0, f"{worker.name} holds {worker.pool.held} blocks"
                assert worker.core.free_slots == worker.shape.max_num_seqs, f"{worker.name} lacks slots"
                assert worker.transfers.settled, f"{worker.name} has a transfer open"

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = until

    @property
    def tokens_out(self) -> int:
        return sum(len(answer.ids) for answer in self.answers.values())

    # ------------------------------------------------------------ the network

    def _deliver(self, action: Callable[[], None]) -> None:
        """After a while, or never, or twice."""
        faults = self.faults
        if faults.lose and self.random.random() < faults.lose:
            return
        self.at(self.now + self.random.uniform(*faults.delay_s), action)
        if faults.double and self.random.random() < faults.double:
            self.at(self.now + self.random.uniform(*faults.delay_s) * 20, action)

    def _coordinator(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorker):
                self._deliver(lambda e=effect: self._to_worker(e.worker, e.message))  # type: ignore[misc]
            elif isinstance(effect, ToFront):
                self._at_client(effect.message)
        deadline = self.cluster.next_deadline(self.now)
        if deadline is not None and (
            self._coordinator_timer > deadline or self._coordinator_timer <= self.now
        ):
            self._coordinator_timer = deadline + 0.01
            self.at(self._coordinator_timer, self._coordinator_turn)

    def _coordinator_turn(self) -> None:
        if self.now >= self._coordinator_timer:
            self._coordinator_timer = float("inf")
            for gap in self.front.gaps(self.now):
                self._coordinator(self.cluster.from_front(gap, self.now))
            self._coordinator(self.cluster.turn(self.now))

    def _at_client(self, message: Message) -> None:
        """The coordinator's word to the front: same process, nothing is lost."""
        if isinstance(message, Rejected):
            for request_id in self.answers[message.id].group:
                self.front.close(request_id)
                self.answers[request_id].end = message.error
        elif isinstance(message, RequestEnded):
            self.front.close(message.id)
            answer = self.answers[message.id]
            answer.end = answer.end or message.error
            self.leave(message.id, message.error)
        else:
            assert isinstance(message, Admitted)

    def _at_front(self, tokens: Tokens, sender: Sender) -> None:
        deltas, heard = self.front.accept(tokens, sender.name, sender.incarnation, self.now)
        for delta in deltas:
            answer = self.answers[delta.id]
            assert answer.end is None, "a token after the end"
            answer.ids += delta.ids
            answer.prompt_logprobs += delta.prompt_logprobs
            if delta.logprobs is not None:
                answer.logprobs += delta.logprobs
            if delta.ids:
                answer.stamps.append(self.now)
            answer.end = delta.finish
        for message in heard:
            self._coordinator(self.cluster.from_front(message, self.now))

    # ------------------------------------------------------------ workers

    def _boot(self, worker: VirtualWorker) -> None:
        self._from_worker(worker, worker.card())
        self._beat(worker, worker.incarnation)

    def _beat(self, worker: VirtualWorker, incarnation: Incarnation) -> None:
        if not worker.alive or worker.incarnation != incarnation:
            return
        message = worker.node.heartbeat(0.0) if worker.registered else worker.card()
        self._from_worker(worker, message)
        self.at(self.now + HEARTBEAT_S, lambda: self._beat(worker, incarnation))

    def _from_worker(self, worker: VirtualWorker, message: Message) -> None:
        sender = worker.sender
        self._deliver(lambda: self._coordinator(self.cluster.from_worker(message, sender, self.now)))

    def _to_worker(self, name: WorkerId, message: Message) -> None:
        worker = self.workers[name]
        if not worker.alive:
            return
        if isinstance(message, Registered):
            worker.registered = True
        elif isinstance(message, HeartbeatAck):
            worker.registered = message.known
            for key in message.abort:
                self._carry_out(worker, worker.node.abort(key, "not wanted", self.now))
        else:
            self._carry_out(worker, worker.node.handle(message, WorkerId("coordinator"), self.now))
        self._turn(worker)

    def _peer_message(self, name: WorkerId, message: Message, sender: WorkerId) -> None:
        worker = self.workers[name]
        if worker.alive:
            self._carry_out(worker, worker.node.handle(message, sender, self.now))
            self._turn(worker)

    def _block(self, name: WorkerId, header: Block, content: object, good: bool, sender: WorkerId) -> None:
        worker = self.workers[name]
        if not worker.alive or not isinstance(worker.node, DecodeWorker):
            return
        block = worker.node.block(header, sender, good, self.now)
        if block is not None:
            worker.write_block(block, content)
        self._turn(worker)

    def _carry_out(self, worker: VirtualWorker, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToCoordinator(message):
                    self._from_worker(worker, message)
                case ToFront(_, message):
                    assert isinstance(message, Tokens)
                    self._deliver(lambda m=message, s=worker.sender: self._at_front(m, s))  # type: ignore[misc]
                case ToReceiver(target, message):
                    self._peer(worker, target.worker, message)
                case ToSender(name, message):
                    self._peer(worker, name, message)
                case SendBlock():
                    self._send_block(worker, effect)

    def _peer(self, worker: VirtualWorker, name: WorkerId, message: Message) -> None:
        self._deliver(lambda: self._peer_message(name, message, worker.name))

    def _send_block(self, worker: VirtualWorker, effect: SendBlock) -> None:
        header = Block(*effect.key, index=effect.index, part=0, checksum=0, size=1000)
        content = worker.read_block(effect.block)
        good = not (self.faults.corrupt and self.random.random() < self.faults.corrupt)
        self._deliver(lambda: self._block(effect.target.worker, header, content, good, worker.name))

    def _turn(self, worker: VirtualWorker) -> None:
        """What an engine's loop does after every event."""
        if not worker.busy:
            batch = worker.node.schedule(self.now)
            if batch is not None:
                worker.busy = True
                step_s = worker.step_time.seconds(batch)
                life = worker.incarnation
                self.at(self.now + step_s, lambda: self._step_done(worker, batch, step_s, life))
        self._carry_out(worker, worker.node.turn(self.now))
        deadline = worker.node.next_deadline()
        if deadline is not None and (worker.timer is None or not self.now < worker.timer <= deadline):
            worker.timer = max(deadline, self.now + 0.001)
            self.at(worker.timer, lambda: self._timer(worker))

    def _timer(self, worker: VirtualWorker) -> None:
        if worker.alive and worker.timer is not None and self.now >= worker.timer:
            worker.timer = None
            self._turn(worker)

    def _step_done(self, worker: VirtualWorker, batch: Batch, step_s: float, life: Incarnation) -> None:
        if worker.incarnation != life:
            return
        if not worker.alive:
            worker.late_step = lambda: self._step_done(worker, batch, step_s, life)
            return
        worker.busy = False
        results = worker.compute(batch)
        self._carry_out(worker, worker.node.finish(batch, results, step_s, self.now))
        self._turn(worker)
