"""Both sides of KV transfers under a state machine: every message lost, doubled, delayed and reordered at will.

One prefill worker and two decode workers, as far as transfers go, each with its pool. The machine decides what arrives
and when, computes, cancels, revokes, rebinds, restarts any of the three, and lets time pass. At its end everything
flows again: what is open must end within the limits of both sides, and a fresh transfer must go through at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.blocks import BlockPool
from common.effects import Effect, SendBlock, ToReceiver, ToSender
from common.messages import (
    AboutRequest,
    Accept,
    Block,
    Cancel,
    Cancelled,
    Credit,
    Delivered,
    Handover,
    Later,
    Nack,
    Offer,
    PeerAddress,
    Refused,
    Revoke,
)
from common.request import Incarnation, Key, WorkerId
from tests.machines import SHRINKING_TAKES, UnderWay, histories
from tests.transfer.pair import BLOCK_BYTES, handover_of, key, offer_of
from transfer.receiver import TransferReceiver
from transfer.sender import SendFailed, Sent, TransferSender

pytestmark = SHRINKING_TAKES

P = WorkerId("prefill-0")
NAMES = (WorkerId("decode-0"), WorkerId("decode-1"))
POOL = 14  # blocks: less than two of the longest transfers
LONGEST = 8
WINDOW = 2  # frames: less than a prompt
LIMITS_S = 240.0  # patience and silence of a sender, then of a receiver
RECOVERS_WITHIN_S = 6.0
Content = tuple[Key, int]
"""What a block holds: the KV of block `index` of a transfer."""


class Offering:
    """A prefill worker as far as transfers go: blocks stay until the transfer is over, then they are written over."""

    def __init__(self) -> None:
        self.pool = BlockPool(POOL)
        self.content: list[Content | None] = [None] * POOL
        self.sender = TransferSender(block_bytes=BLOCK_BYTES, window_bytes=WINDOW * BLOCK_BYTES)
        self.held: dict[Key, list[int]] = {}
        self.computed: dict[Key, int] = {}
        self.target: dict[Key, WorkerId] = {}

    def compute(self, which: Key, count: int) -> None:
        blocks, done = self.held[which], self.computed[which]
        for index in range(done, min(done + count, len(blocks))):
            self.content[blocks[index]] = (which, index)
        self.computed[which] = min(done + count, len(blocks))

    def over(self, which: Key) -> None:
        blocks = self.held.pop(which)
        del self.computed[which], self.target[which]
        self.pool.release(blocks)
        for block in blocks:
            self.content[block] = None

    def check(self) -> None:
        self.pool.check()
        assert self.pool.held == sum(map(len, self.held.values()))
        assert len(self.sender) == len(self.held)
        assert self.sender.bytes_in_flight <= WINDOW * BLOCK_BYTES * len(NAMES)


@dataclass
class Taking:
    """One life of a decode worker as far as transfers go: reserves whole, answers as the real one."""

    address: PeerAddress
    pool: BlockPool = field(default_factory=lambda: BlockPool(POOL))
    content: list[Content | None] = field(default_factory=lambda: [None] * POOL)
    reserved: dict[Key, list[int]] = field(default_factory=dict)
    running: dict[Key, list[int]] = field(default_factory=dict)
    done: set[Key] = field(default_factory=set)
    receiver: TransferReceiver = field(
        default_factory=lambda: TransferReceiver(block_bytes=BLOCK_BYTES, window_bytes=WINDOW * BLOCK_BYTES)
    )

    def hear(self, message: AboutRequest, now: float) -> list[Effect]:
        which = message.key
        if isinstance(message, Cancel):
            if self.receiver.drop(which):
                self.give_back(which)
            return [ToSender(P, Cancelled(*which))]
        if which in self.done:
            return [ToSender(P, Delivered(*which))]
        if isinstance(message, Offer):
            return (
                self.receiver.answer_again(which) if which in self.receiver else self._offered(message, now)
            )
        assert isinstance(message, Handover)
        if which in self.receiver:
            return self.receiver.handed_over(message, now)
        return [ToSender(P, Revoke(*which, "not accepted here"))]

    def _offered(self, offer: Offer, now: float) -> list[Effect]:
        count = offer.num_tokens // 4
        if count > POOL:
            return [ToSender(P, Refused(*offer.key, "never fits"))]
        blocks = self.pool.allocate(count)
        if blocks is None:
            return [ToSender(P, Later(*offer.key, 0.1))]
        self.reserved[offer.key] = blocks
        return self.receiver.accept(offer.key, P, blocks, 0, count, now)

    def frame(self, header: Block, content: Content, good: bool, now: float) -> list[Effect]:
        """The bytes are put where they belong before they are checked, as by a real one."""
        place = self.receiver.place(header, P)
        if place is not None:
            assert self.reserved[header.key][header.index] == place, "not the block that is reserved for it"
            self.content[place] = content if good else None
        effects = [] if good else self.receiver.nack(header, P, "checksum")
        assert self.receiver.block(header, P, good, now) == (place if good else None)
        return effects

    def turn(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for ready in self.receiver.ready():
            blocks = self.running[ready.key] = self.reserved.pop(ready.key)
            arrived = [self.content[block] for block in blocks]
            assert arrived == [(ready.key, index) for index in range(len(blocks))], "delivered, but not whole"
            assert ready.key not in self.done, "delivered twice"
            self.done.add(ready.key)
            effects.append(ToSender(P, Delivered(*ready.key)))
        said, lost = self.receiver.expire(now)
        for which in lost:
            self.give_back(which)
        return effects + said + self.receiver.flush()

    def give_back(self, which: Key) -> None:
        self.pool.release(self.reserved.pop(which))

    def check(self) -> None:
        self.pool.check()
        assert self.pool.held == sum(map(len, (*self.reserved.values(), *self.running.values())))
        assert len(self.receiver) == len(self.reserved)


@dataclass(frozen=True)
class Frame:
    header: Block
    content: Content


Arriving = tuple[WorkerId, WorkerId, AboutRequest | Frame]
"""To whom, from whom, what."""


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.under_way: UnderWay[Arriving] = UnderWay()
        self.p = Offering()
        self.lives = dict.fromkeys(NAMES, 0)
        self.ends = {name: self._born(name) for name in NAMES}
        self.delivered: set[Key] = set()  # at any life of any decode worker
        self.over: set[Key] = set()  # ended at the sender
        self.opened = 0
        self.births = 1  # of processes after the first ones: few, else nothing gets far
        self.flows_since = float("inf")  # nothing is lost any more

    def _born(self, name: WorkerId) -> Taking:
        self.lives[name] += 1
        life = Incarnation(self.lives[name])
        return Taking(PeerAddress(name, life, f"{name}/{life}", f"{name}/{life}"))

    # ------------------------------------------------------------ what the prefill worker does

    @initialize(sizes=st.lists(st.integers(2, LONGEST), min_size=1, max_size=3), rounds=st.integers(0, 2))
    def begin(self, sizes: list[int], rounds: int) -> None:
        """Most histories begin with transfers under way."""
        for number, blocks in enumerate(sizes):
            self.open(blocks, NAMES[number % 2])
        self.all_goes_well_for_a_while(rounds)

    @rule(blocks=st.integers(1, LONGEST), to=st.sampled_from(NAMES))
    def open(self, blocks: int, to: WorkerId) -> None:
        taken = self.p.pool.allocate(blocks)
        if taken is None:
            return
        self.opened += 1
        which = key(f"r{self.opened}")
        self.p.held[which], self.p.computed[which], self.p.target[which] = taken, 0, to
        self._carry(self.p.sender.open(offer_of(which, blocks), self.ends[to].address, taken, self.now), P)
        self._turn()

    @precondition(lambda self: self.p.held)
    @rule(number=st.integers(0, 9), count=st.integers(1, LONGEST))
    def compute(self, number: int, count: int) -> None:
        which = self._open_one(number)
        if self.p.computed[which] < len(self.p.held[which]):
            self._compute(which, count)

    def _compute(self, which: Key, count: int) -> None:
        self.p.compute(which, count)
        done, whole = self.p.computed[which], len(self.p.held[which])
        self.p.sender.blocks_computed(which, done, self.now)
        if done == whole:
            self._carry(self.p.sender.prompt_computed(handover_of(which, whole), self.now), P)
        self._turn()

    @precondition(lambda self: self.p.held)
    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        which = self._open_one(number)
        self._carry(self.p.sender.cancel(which, "client left", self.now), P)
        self._ended(which)

    @precondition(lambda self: self.p.held)
    @rule(number=st.integers(0, 9), to=st.sampled_from(NAMES))
    def rebind(self, number: int, to: WorkerId) -> None:
        which = self._open_one(number)
        self.p.target[which] = to
        self._carry(self.p.sender.rebind(which, self.ends[to].address, self.now), P)

    @precondition(lambda self: self.opened > 5 * self.births)
    @rule()
    def prefill_worker_restarts(self) -> None:
        self.births += 1
        self.p = Offering()

    # ------------------------------------------------------------ what the decode workers do

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 9))
    def revoke(self, name: WorkerId, number: int) -> None:
        end = self.ends[name]
        if end.reserved:
            which = list(end.reserved)[number % len(end.reserved)]
            self._carry(end.receiver.revoke(which, "out of blocks"), name)
            end.give_back(which)

    @rule(name=st.sampled_from(NAMES))
    def finish_the_oldest(self, name: WorkerId) -> None:
        end = self.ends[name]
        if end.running:
            end.pool.release(end.running.pop(next(iter(end.running))))

    @precondition(lambda self: self.opened > 5 * self.births)
    @rule(name=st.sampled_from(NAMES))
    def decode_worker_restarts(self, name: WorkerId) -> None:
        self.births += 1
        self.ends[name] = self._born(name)

    # ------------------------------------------------------------ network and time

    @rule(rounds=st.integers(1, 4))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(len(self.under_way)):
                self._arrive(self.under_way.take(0))
            for which in list(self.p.held):
                if self.p.computed.get(which, LONGEST) < len(self.p.held[which]):
                    self._compute(which, 2)

    @precondition(lambda self: self.under_way)
    @rule(
        which=st.integers(0, 30), fate=st.sampled_from(("arrives", "arrives", "comes again later", "is lost"))
    )
    def one_message(self, which: int, fate: str) -> None:
        if fate == "is lost":
            self.under_way.lose(which)
        else:
            self._arrive(self.under_way.take(which) if fate == "arrives" else self.under_way.copy(which))

    @precondition(lambda self: self.under_way)
    @rule(kind=st.sampled_from((Frame, Credit, Accept, Nack, Delivered, Handover, Cancel)))
    def all_of_a_kind_are_lost(self, kind: type[object]) -> None:
        self.under_way.lose_all(lambda item: isinstance(item[2], kind))

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 30), came_before=st.booleans())
    def is_corrupted(self, which: int, came_before: bool) -> None:
        """`came_before`: it came whole, then comes again."""
        frames = self.under_way.places(lambda item: isinstance(item[2], Frame))
        if frames:
            frame = self.under_way.take(frames[which % len(frames)])
            if came_before:
                self._arrive(frame)
            self._arrive(frame, good=False)

    @rule(seconds=st.sampled_from((0.01, 0.2, 1.0, 2.5, 10.0, 31.0, 46.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._turn()

    # ------------------------------------------------------------ inside

    def _open_one(self, number: int) -> Key:
        return list(self.p.held)[number % len(self.p.held)]

    def _arrive(self, item: Arriving, good: bool = True) -> None:
        to, sender, what = item
        if to == P:
            assert isinstance(what, AboutRequest)
            effects, events = self.p.sender.receive(what, sender, self.now)
            self._carry(effects, P)
            assert not events or self.p.target[events[0].key] == sender, "another worker's word ends it"
            self._events(events)
        elif isinstance(what, Frame):
            self._carry(self.ends[to].frame(what.header, what.content, good, self.now), to)
        else:
            self._carry(self.ends[to].hear(what, self.now), to)
        self._turn()

    def _turn(self) -> None:
        effects, events = self.p.sender.expire(self.now)
        self._carry(effects, P)
        self._events(events)
        self._carry(self.p.sender.pump(self.now), P)
        for name, end in self.ends.items():
            self._carry(end.turn(self.now), name)
            self.delivered |= end.done

    def _events(self, events: list[Sent | SendFailed]) -> None:
        for event in events:
            if isinstance(event, Sent):
                assert event.key in self.delivered, "said to be delivered, and nobody has it"
            elif self.now > self.flows_since + RECOVERS_WITHIN_S:
                assert "no progress" not in event.reason, "it stands still though messages flow"
            self._ended(event.key)

    def _ended(self, which: Key) -> None:
        assert which not in self.over, "ended twice"
        self.over.add(which)
        self.p.over(which)

    def _carry(self, effects: list[Effect], said_by: WorkerId) -> None:
        for effect in effects:
            match effect:
                case ToReceiver(target, message) | ToSender(target, message):
                    assert isinstance(message, AboutRequest)
                    name = target.worker if isinstance(target, PeerAddress) else target
                    self.under_way.put((name, said_by, message))
                case SendBlock(target, which, index, block):
                    assert self.p.held[which][index] == block, "a block leaves that is not the transfer's"
                    content = self.p.content[block]
                    assert content == (which, index), "a block leaves before it is computed"
                    header = Block(*which, index=index, part=0, checksum=0, size=BLOCK_BYTES)
                    self.under_way.put((target.worker, said_by, Frame(header, content)))

    # ------------------------------------------------------------ what holds always, and in the end

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.p.check()
        for end in self.ends.values():
            end.check()

    def teardown(self) -> None:
        self.flows_since = self.now
        self._let_all_flow(LIMITS_S)
        assert self.p.sender.settled and self.p.pool.held == 0, f"open: {list(self.p.held)}"
        for name, end in self.ends.items():
            assert end.receiver.settled and end.pool.held == 0, f"{name} holds {list(end.reserved)}"
        self.open(LONGEST, NAMES[0])
        fresh = self._open_one(0)
        self._let_all_flow(1.0)
        assert fresh in self.ends[NAMES[0]].done and fresh in self.over, "nothing goes through any more"

    def _let_all_flow(self, within_s: float) -> None:
        """Nothing is lost any more, prompts are computed, and what was delivered runs to its end."""
        until = self.now + within_s
        while self.now < until:
            while len(self.under_way):
                self._arrive(self.under_way.take(0))
                self.every_block_has_one_owner()
            for which in list(self.p.held):
                if self.p.computed.get(which, LONGEST) < len(self.p.held[which]):
                    self._compute(which, LONGEST)
            for name, end in self.ends.items():
                while end.running:
                    self.finish_the_oldest(name)
            deadlines = [self.p.sender.next_deadline()]
            deadlines += [end.receiver.next_deadline() for end in self.ends.values()]
            times = [time for time in deadlines if time is not None]
            if not times and not len(self.under_way):
                return
            if not len(self.under_way):
                self.now = max(self.now + 0.001, min(times, default=until))
                self._turn()


TransferMachine.TestCase.settings = histories(100, steps=60)
TestTransfers = TransferMachine.TestCase
