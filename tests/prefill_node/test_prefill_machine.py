"""A prefill worker under a state machine: commands and peers' words in any order, steps late, ends while one is out.

At the end of each history its decode workers are honest: everything must leave within the limits of a transfer, and a
fresh prompt must go through.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from common.effects import Effect, SendBlock, ToReceiver
from common.messages import (
    AboutRequest,
    Accept,
    Cancel,
    Cancelled,
    Credit,
    Delivered,
    Handover,
    Later,
    Nack,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Revoke,
)
from common.request import Key, WorkerId
from common.sequence import Sequence
from prefill_node.worker import PrefillWorker
from tests.common.stepping import BLOCK, OTHER_TARGET, TARGET
from tests.common.worker_machine import (
    REQUESTS,
    WorkerMachine,
    ids_of,
    numbers,
    outputs_before,
    packed_before,
    steps_ahead,
)
from tests.machines import SHRINKING_TAKES, histories
from transfer.sender import TransferSender

pytestmark = SHRINKING_TAKES

WINDOW = 3
LIMITS_S = 160.0
targets = st.sampled_from((TARGET, OTHER_TARGET))


def words(key: Key, wanted: tuple[int, ...]) -> tuple[AboutRequest, ...]:
    """All that a decode worker may say of a transfer."""
    return (
        Accept(*key, wanted, WINDOW * 100),
        Later(*key, 0.1),
        Refused(*key, "no"),
        Credit(*key, wanted),
        Nack(*key, wanted[:2], "checksum"),
        Delivered(*key),
        Revoke(*key, "out of blocks"),
        Cancel(*key, "aborted"),
        Cancelled(*key),
    )


class PrefillMachine(WorkerMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sender = TransferSender(block_bytes=100, window_bytes=WINDOW * 100)
        self.node = PrefillWorker(self.core, self.sender, fingerprint="fp", block_bytes=100, max_waiting=5)
        self.worker = self.node
        self.said: list[tuple[WorkerId, AboutRequest]] = []  # to decode workers, unanswered yet

    def sequences(self) -> list[Sequence]:
        return self.node._scheduler.sequences()

    # ------------------------------------------------------------ commands

    @initialize(given=st.lists(numbers, max_size=4, unique=True), whose=targets)
    def begin(self, given: list[int], whose: PeerAddress) -> None:
        """Most histories begin with prompts to compute."""
        for number in given:
            self.prefill(number, 0, whose)
        self.step()

    @rule(number=numbers, ahead=steps_ahead, who=targets)
    def prefill(self, number: int, ahead: int, who: PeerAddress) -> None:
        key = self.key(number, ahead)
        before = packed_before(REQUESTS[number], key[1])
        self.command(Prefill(*key, REQUESTS[number], before, who))

    @rule(number=numbers, ahead=steps_ahead, who=targets)
    def rebind(self, number: int, ahead: int, who: PeerAddress) -> None:
        self.command(Rebind(*self.key(number, ahead), who))

    @rule(
        number=numbers,
        ahead=steps_ahead,
        word=st.integers(0, 8),
        wanted=st.lists(st.integers(0, 12), max_size=12, unique=True),
        who=targets,
    )
    def decode_worker_says(
        self, number: int, ahead: int, word: int, wanted: list[int], who: PeerAddress
    ) -> None:
        """Anything, whether or not it was asked."""
        self.hear(words(self.key(number, ahead), tuple(sorted(wanted)))[word], who.worker)

    @precondition(lambda self: self.said)
    @rule(which=st.integers(0, 9))
    def decode_worker_answers(self, which: int) -> None:
        """What an honest one says to something that was said to it, in any order."""
        self._answer(*self.said.pop(which % len(self.said)))

    def _answer(self, to: WorkerId, message: AboutRequest) -> None:
        key = message.key
        match message:
            case Offer():
                count = -(-message.num_tokens // BLOCK)
                self.hear(Accept(*key, tuple(range(count)), WINDOW * 100), to)
            case Handover():
                self.hear(Delivered(*key), to)
            case Cancel():
                self.hear(Cancelled(*key), to)
            case Credit():
                self.hear(message, to)

    def peers(self, effect: Effect) -> None:
        match effect:
            case ToReceiver(target, message):
                assert isinstance(message, AboutRequest)
                self.said.append((target.worker, message))
            case SendBlock(target, key, index, block):
                wanted = REQUESTS[int(key[0][1:])]
                tokens = ids_of(wanted) + outputs_before(wanted, key[1])
                content = tokens[index * BLOCK : (index + 1) * BLOCK]
                assert self.model.content[block][: len(content)] == content, "not what the block should hold"
                self.said.append((target.worker, Credit(*key, (index,))))
        del self.said[:-60]

    # ------------------------------------------------------------ what holds always, and in the end

    @invariant()
    def window_is_kept(self) -> None:
        assert self.sender.bytes_in_flight <= 2 * WINDOW * 100
        assert set(self.node._targets) <= set(self.node.live_keys())
        assert {k for k in self.node.live_keys() if k in self.sender} == set(self.sender._outgoing)

    def teardown(self) -> None:
        self._let_all_end(LIMITS_S)
        self.check_over()
        assert self.sender.settled and not self.node._targets
        if not self.node.draining:
            self.prefill(1, 1, TARGET)
            self._let_all_end(10.0)
            assert self.ends[self.key(1, 0)].outcome == "handed_over", "nothing goes through any more"

    def _let_all_end(self, within_s: float) -> None:
        """Decode workers are honest and messages flow; the steps go on."""
        until = self.now + within_s
        while self.now < until and not (self.node.idle and self.sender.settled and self.out is None):
            if self.out is not None:
                self.finish()
            self.step()
            while self.said:
                self._answer(*self.said.pop(0))
            self.adds_up()
            self.now = max(self.now + 0.05, min(self.sender.next_deadline() or until, self.now + 1.0))
            self.turn()


PrefillMachine.TestCase.settings = histories(100, steps=60)
TestPrefillWorker = PrefillMachine.TestCase
