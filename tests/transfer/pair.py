"""One sender and one receiver with a network between them that a test can spoil."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from common.effects import Effect, SendBlock, ToReceiver, ToSender
from common.messages import (
    AboutRequest,
    Block,
    Cancel,
    Cancelled,
    Delivered,
    Handover,
    Later,
    Offer,
    PeerAddress,
    Refused,
    Revoke,
)
from common.request import (
    Attempt,
    FrontId,
    Incarnation,
    Key,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    pack_ids,
)
from transfer.receiver import TransferReceiver
from transfer.sender import SenderEvent, TransferSender

P = WorkerId("prefill-0")
D = PeerAddress(WorkerId("decode-0"), Incarnation(1), "d0", "d0")
D1 = PeerAddress(WorkerId("decode-1"), Incarnation(1), "d1", "d1")
BLOCK_BYTES = 100
BLOCK_SIZE = 4


def key(name: str = "r", attempt: int = 1) -> Key:
    return (RequestId(name), Attempt(attempt))


def offer_of(which: Key, num_blocks: int) -> Offer:
    request = Request(
        which[0], pack_ids(range(num_blocks * BLOCK_SIZE)), SamplingParams(max_tokens=9), FrontId("f")
    )
    return Offer(*which, request, b"", num_blocks * BLOCK_SIZE, b"", "fp")


def handover_of(which: Key, num_blocks: int) -> Handover:
    return Handover(*which, pack_ids([5]), None, num_blocks, 0)


@dataclass(slots=True)
class Network:
    """Per message and frame: the chances that it is lost, comes twice, and between which delays it comes."""

    lose: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.001)


@dataclass(slots=True)
class Receiving:
    """A decode worker as far as transfers go: accepts what its slots allow, answers as the real one."""

    receiver: TransferReceiver
    name: WorkerId
    room: int = 1 << 30  # blocks
    held: dict[Key, list[int]] = field(default_factory=dict)
    hits: dict[Key, int] = field(default_factory=dict)
    content: dict[int, object] = field(default_factory=dict)
    done: dict[Key, list[object]] = field(default_factory=dict)
    times_done: dict[Key, int] = field(default_factory=dict)
    next_block: int = 0
    shut: bool = False

    def hear(self, message: AboutRequest, now: float) -> list[Effect]:
        which = message.key
        match message:
            case Offer():
                return self._offered(message, now)
            case Handover():
                if which in self.receiver:
                    return self.receiver.handed_over(message, now)
                if which in self.done:
                    return [ToSender(P, Delivered(*which))]
                return [ToSender(P, Revoke(*which, "not accepted here"))]
            case Cancel():
                if self.receiver.drop(which):
                    del self.held[which]
                return [ToSender(P, Cancelled(*which))]
        raise AssertionError(message)

    def _offered(self, offer: Offer, now: float) -> list[Effect]:
        which = offer.key
        if which in self.receiver:
            return self.receiver.answer_again(which)
        if which in self.done:
            return [ToSender(P, Delivered(*which))]
        if self.shut:
            return [ToSender(P, Refused(*which, "draining"))]
        count = offer.num_tokens // BLOCK_SIZE
        if sum(map(len, self.held.values())) + count > self.room:
            return [ToSender(P, Later(*which, 0.1))]
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.held[which] = blocks
        hits = min(self.hits.get(which, 0), count)
        for index in range(hits):
            self.content[blocks[index]] = (which[0], index)
        return self.receiver.accept(which, P, blocks, hits, count, now)

    def frame(self, header: Block, content: object, good: bool, now: float) -> list[Effect]:
        effects = [] if good else self.receiver.nack(header, P, "checksum")
        block = self.receiver.block(header, P, good, now)
        if block is not None:
            self.content[block] = content
        return effects

    def turn(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for ready in self.receiver.ready():
            blocks = self.held.pop(ready.key)
            self.done[ready.key] = [self.content[block] for block in blocks]
            self.times_done[ready.key] = self.times_done.get(ready.key, 0) + 1
            effects.append(ToSender(P, Delivered(*ready.key)))
        said, lost = self.receiver.expire(now)
        for which in lost:
            del self.held[which]
        return effects + said + self.receiver.flush()


class Pair:
    """Drives both ends in virtual time. `log` is everything that was said, in order of sending."""

    def __init__(self, seed: int = 0, network: Network | None = None, **limits: float) -> None:
        self.now = 0.0
        self.network = network or Network()
        self.random = Random(seed)
        self.sender = TransferSender(block_bytes=BLOCK_BYTES, window_bytes=4 * BLOCK_BYTES, **limits)
        self.ends = {
            target.worker: Receiving(
                TransferReceiver(block_bytes=BLOCK_BYTES, window_bytes=4 * BLOCK_BYTES), target.worker
            )
            for target in (D, D1)
        }
        self.blocks: dict[Key, int] = {}
        self.events: list[SenderEvent] = []
        self.log: list[object] = []
        self.drop: Callable[[object], bool] = lambda message: False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def receiving(self) -> Receiving:
        return self.ends[D.worker]

    # ------------------------------------------------------------ what a prefill worker does

    def open(self, which: Key, num_blocks: int, target: PeerAddress = D) -> None:
        self.blocks[which] = num_blocks
        self.carry(self.sender.open(offer_of(which, num_blocks), target, list(range(num_blocks)), self.now))

    def compute(self, which: Key, count: int) -> None:
        self.sender.blocks_computed(which, count, self.now)
        self.turn()

    def finish(self, which: Key) -> None:
        self.carry(self.sender.prompt_computed(handover_of(which, self.blocks[which]), self.now))
        self.turn()

    def whole(self, which: Key, num_blocks: int, target: PeerAddress = D) -> None:
        self.open(which, num_blocks, target)
        self.finish(which)

    # ------------------------------------------------------------ time and network

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def run(self, seconds: float) -> None:
        """Everything due within `seconds`; both ends get a turn at each of their deadlines."""
        until = self.now + seconds
        self.turn()
        while True:
            times = [self._heap[0][0]] if self._heap else []
            deadlines = [
                self.sender.next_deadline(),
                *(e.receiver.next_deadline() for e in self.ends.values()),
            ]
            times += [max(d, self.now + 0.001) for d in deadlines if d is not None]
            if not times or min(times) > until:
                break
            self.now = min(times)
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            self.turn()
        self.now = until
        self.turn()

    def turn(self) -> None:
        effects, events = self.sender.expire(self.now)
        self.events += events
        self.carry(effects + self.sender.pump(self.now))
        for end in self.ends.values():
            self.carry(end.turn(self.now), end.name)

    def carry(self, effects: list[Effect], said_by: WorkerId = P) -> None:
        for effect in effects:
            match effect:
                case ToReceiver(target, message):
                    end = self.ends[target.worker]
                    self._travel(message, lambda e=end, m=message: self._to_end(e, m))  # type: ignore[misc]
                case ToSender(_, message):
                    self._travel(message, lambda m=message: self._to_sender(m, said_by))  # type: ignore[misc]
                case SendBlock(target, which, index, _):
                    self._send_frame(self.ends[target.worker], which, index)

    def _send_frame(self, end: Receiving, which: Key, index: int) -> None:
        header = Block(*which, index=index, part=0, checksum=0, size=BLOCK_BYTES)
        good = self.random.random() >= self.network.corrupt
        content: object = (which[0], index) if good else "rubbish"
        self._travel(header, lambda: self.carry(end.frame(header, content, good, self.now), end.name))

    def _to_end(self, end: Receiving, message: object) -> None:
        assert isinstance(message, AboutRequest)
        self.carry(end.hear(message, self.now), end.name)

    def _to_sender(self, message: object, said_by: WorkerId) -> None:
        assert isinstance(message, AboutRequest)
        effects, events = self.sender.receive(message, said_by, self.now)
        self.events += events
        self.carry(effects)

    def _travel(self, message: object, arrive: Callable[[], None]) -> None:
        self.log.append(message)
        network = self.network
        if self.drop(message) or self.random.random() < network.lose:
            return
        self.at(self.now + self.random.uniform(*network.delay_s), arrive)
        if self.random.random() < network.double:
            self.at(self.now + self.random.uniform(*network.delay_s) * 3, arrive)

    # ------------------------------------------------------------ what must hold in the end

    def said(self, kind: type[object]) -> int:
        return sum(isinstance(message, kind) for message in self.log)

    def check_settled(self) -> None:
        assert self.sender.settled
        for end in self.ends.values():
            assert end.receiver.settled and not end.held, f"{end.name} holds {list(end.held)}"

    def check_delivered(self, which: Key, to: PeerAddress = D) -> None:
        end = self.ends[to.worker]
        assert end.done[which] == [(which[0], index) for index in range(self.blocks[which])]
        assert end.times_done[which] == 1
