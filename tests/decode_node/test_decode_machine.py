"""A decode worker under a state machine: commands, offers, frames and hand-overs in any order, doubled, stale, lost.

Steps come back late and requests end while one is out; transfers are cancelled, corrupted and taken up again; blocks
run out. At the end of each history the prefill workers are honest: everything must leave, and a fresh one go through.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from bench.virtual_model import continuation
from common.batching import Batch
from common.effects import Effect, ToSender
from common.messages import AboutRequest, Block, Cancel, Decode, Handover, Later, Nack, Offer, Revoke
from common.request import Key, WorkerId, pack_ids
from common.sequence import Sequence
from decode_node.chunk_budget import MIN_CHUNK
from decode_node.worker import DecodeWorker
from tests.common.stepping import BLOCK
from tests.common.worker_machine import (
    REQUESTS,
    P,
    Q,
    WorkerMachine,
    ids_of,
    numbers,
    outputs_before,
    packed_before,
    steps_ahead,
)
from tests.machines import SHRINKING_TAKES, histories
from transfer.receiver import TransferReceiver

pytestmark = SHRINKING_TAKES

MAX_STEPS = 2000
senders = st.sampled_from((P, Q))


def number_of(key: Key) -> int:
    return int(key[0][1:])


def tokens_before(key: Key) -> list[int]:
    """What has KV when the transfer `key` is whole."""
    wanted = REQUESTS[number_of(key)]
    return ids_of(wanted) + outputs_before(wanted, key[1])


class DecodeMachine(WorkerMachine):
    def __init__(self) -> None:
        super().__init__()
        self.receiver = TransferReceiver(block_bytes=100)
        self.node = DecodeWorker(
            self.core,
            self.receiver,
            fingerprint="fp",
            block_bytes=100,
            max_waiting=3,
            max_inflight=self.max_inflight,
        )
        self.worker = self.node
        self.offered: dict[Key, WorkerId] = {}  # by whom last
        self.to_offer: dict[Key, WorkerId] = {}  # again, by honest senders
        self.honest = False

    def sequences(self) -> list[Sequence]:
        return self.node._scheduler.held.sequences()

    # ------------------------------------------------------------ what it hears

    @initialize(
        given=st.lists(numbers, max_size=4, unique=True),
        rest=st.lists(numbers, max_size=2, unique=True),
        other=st.sampled_from((False, False, True)),
    )
    def begin(self, given: list[int], rest: list[int], other: bool) -> None:
        """Most histories begin with transfers, some of them whole, and prompts to compute here."""
        for number in given:
            self.offer(number, 0, P)
            if self.offered and number % 2:
                self.some_frames(len(self.offered) - 1, 13)
                self.hand_over(len(self.offered) - 1, other)
        for number in rest:
            self.decode(number, 1)

    @rule(number=numbers, ahead=steps_ahead)
    def decode(self, number: int, ahead: int) -> None:
        """An attempt goes to one pair: no worker is told to compute what another one offers it. Even ones are."""
        key = self.key(number, ahead)
        if key[1] % 2 == 0:
            self.command(Decode(*key, REQUESTS[number], packed_before(REQUESTS[number], key[1])))

    @rule(number=numbers, ahead=steps_ahead, sender=senders)
    def offer(self, number: int, ahead: int, sender: WorkerId) -> None:
        key = self.key(number, ahead)
        if key[1] % 2 == 1:
            self._offer(key, sender)

    def _offer(self, key: Key, sender: WorkerId) -> None:
        wanted = REQUESTS[number_of(key)]
        if wanted.sampling.max_tokens > 1:  # else nobody offers it
            self.offered[key] = sender
            before = packed_before(wanted, key[1])
            said = self.hear(Offer(*key, wanted, before, len(tokens_before(key)), b"", "fp"), sender)
            assert any(isinstance(e, ToSender) and e.worker == sender for e in said), "an offer is answered"

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 9), index=st.integers(0, 12), good=st.booleans())
    def frame(self, which: int, index: int, good: bool) -> None:
        self._frame(self._one(which), index, good)

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 9), some=st.integers(1, 13))
    def some_frames(self, which: int, some: int) -> None:
        key = self._one(which)
        for index in range(min(some, -(-len(tokens_before(key)) // BLOCK))):
            self._frame(key, index, True)

    def _frame(self, key: Key, index: int, good: bool) -> None:
        header = Block(*key, index=index, part=0, checksum=0, size=100)
        sender = self.offered[key]
        reserved = self.node._scheduler.held.reserved.get(key)
        place = self.node.place(header, sender)
        assert place is None or (reserved is not None and reserved.blocks[index] == place)
        assert place is None or self.core.pool._holders[place] == 1, "a block that others read is written"
        if place is not None:  # the bytes are there before they are checked, as in the real loop
            content = tokens_before(key)[index * BLOCK : (index + 1) * BLOCK]
            self.model.content[place] = content if good else [-1] * len(content)
        self.node.block(header, sender, good, self.now)
        self.turn()

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 9), other=st.sampled_from((False, False, False, True)))
    def hand_over(self, which: int, other: bool) -> None:
        """`other`: of another request, by a mistake of its sender."""
        self._hand_over(self._one(which), other)

    def _hand_over(self, key: Key, other: bool = False) -> None:
        wanted = REQUESTS[number_of(key)]
        outputs = continuation(ids_of(wanted), len(outputs_before(wanted, key[1])) + 1 + other)
        blocks = -(-len(tokens_before(key)) // BLOCK)
        self.hear(Handover(*key, pack_ids(outputs), None, blocks, 0), self.offered[key])

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 9), sender=senders)
    def cancel(self, which: int, sender: WorkerId) -> None:
        self.hear(Cancel(*self._one(which), "client left"), sender)

    def _one(self, which: int) -> Key:
        return list(self.offered)[which % len(self.offered)]

    def peers(self, effect: Effect) -> None:
        assert isinstance(effect, ToSender) and isinstance(effect.message, AboutRequest)
        if self.honest:
            self._answer(effect.message, effect.worker)

    # ------------------------------------------------------------ what holds always, and in the end

    def _answer(self, message: AboutRequest, sender: WorkerId) -> None:
        match message:
            case Nack():
                for index in message.indices:
                    self._frame(message.key, index, True)
            case Revoke() | Later():
                self.to_offer[message.key] = sender

    def budget(self, batch: Batch) -> int:
        return max(self.core.max_num_batched_tokens, self.node._scheduler.held.num_running + MIN_CHUNK)

    @invariant()
    def reservations_are_transfers(self) -> None:
        reserved = self.node._scheduler.held.reserved
        assert set(reserved) == set(self.receiver._incoming) == set(self.node._senders) & set(reserved)
        for key, seq in reserved.items():
            assert not seq.in_batch and seq.slot < 0, f"{key} runs before it is whole"
            assert len(seq.blocks) == self.core.blocks_for(len(seq.tokens) + 1), "not reserved whole"

    def teardown(self) -> None:
        self.honest = True
        self._let_all_end()
        self.check_over()
        assert self.receiver.settled and not self.node._senders and not self.node._moved_bytes
        if not self.node.draining:
            self.offer(3, 1 + self.newest[3] % 2, P)
            self.decode(4, 2 - self.newest[4] % 2)
            self._let_all_end()
            fresh = (self.ends[self.key(3, 0)], self.ends[self.key(4, 0)])
            assert [ended.outcome for ended in fresh] == ["finished", "finished"], (
                "nothing goes through any more"
            )

    def _let_all_end(self) -> None:
        """Prefill workers send what they promised; the steps go on; nothing waits for a limit to pass."""
        for _ in range(MAX_STEPS):
            if self.node.idle and self.out is None and not self.to_offer:
                return
            again, self.to_offer = self.to_offer, {}
            for key, sender in again.items():
                self._offer(key, sender)
            for key in list(self.receiver._incoming):
                self._hand_over(key)
            if self.out is not None:
                self.finish()
            self.step()
            self.adds_up()
            self.now += 0.1
            self.turn()


DecodeMachine.TestCase.settings = histories(100, steps=60)
TestDecodeWorker = DecodeMachine.TestCase


class TwoBatchesOut(DecodeMachine):
    """On a device the next step is decided while one runs: some rows stand for tokens that nobody knows yet."""

    max_inflight = 2


TwoBatchesOut.TestCase.settings = histories(100, steps=60)
TestTwoBatchesOut = TwoBatchesOut.TestCase
