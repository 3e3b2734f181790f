"""A transfer from offer to delivery: told in phases, then under every loss, doubling, delay and order at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from common.effects import SendBlock
from common.messages import (
    AboutRequest,
    Accept,
    Block,
    Cancel,
    Cancelled,
    Credit,
    Delivered,
    Handover,
    Nack,
    Offer,
    Revoke,
)
from common.request import WorkerId
from tests.transfer.pair import D1, D, Network, P, Pair, handover_of, key, offer_of
from transfer.receiver import TransferReceiver
from transfer.sender import MAX_NACKS, SendFailed, Sent, TransferSender

R = key()


def failures(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, SendFailed)]


def test_peers_whose_addresses_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.sender.MAX_PEERS", 2)
    sender = TransferSender(block_bytes=100)
    for number in range(4):
        sender.open(offer_of(key(f"r{number}"), 1), replace(D, worker=WorkerId(f"d{number}")), [0], 0.0)
        sender.cancel(key(f"r{number}"), "over", 0.0)
    assert list(sender._addresses) == ["d2", "d3"]


# ---------------------------------------------------------------- the good path


def test_story_blocks_move_while_later_chunks_compute() -> None:
    """1 offered  2 accepted  3 blocks of the first chunk go  4 the rest  5 handed over  6 delivered, forgotten."""
    pair = Pair()
    pair.open(R, 6)
    pair.run(0.01)
    assert pair.said(Accept) == 1 and pair.said(Block) == 0, "nothing is computed yet"
    nearly_whole = pair.receiving.receiver.nearly_whole
    assert nearly_whole(5) == [] and nearly_whole(6) == [R]
    pair.compute(R, 2)
    pair.run(0.01)
    assert pair.said(Block) == 2 and pair.said(Handover) == 0
    assert nearly_whole(3) == [] and nearly_whole(4) == [R]
    pair.finish(R)
    pair.run(0.01)
    assert [type(m) for m in pair.events] == [Sent] and pair.said(Block) == 6
    assert isinstance(pair.events[0], Sent) and (pair.events[0].blocks, pair.events[0].seconds <= 0.03) == (
        6,
        True,
    )
    pair.check_delivered(R)
    pair.check_settled()


@pytest.mark.parametrize("hits", [1, 3, 4])
def test_BR_013_blocks_the_receiver_holds_are_not_sent(hits: int) -> None:
    """Down to none at all, and the transfer completes all the same."""
    pair = Pair()
    pair.receiving.hits[R] = hits
    pair.whole(R, 4)
    pair.run(0.1)
    assert pair.said(Block) == 4 - hits
    pair.check_delivered(R)
    pair.check_settled()


def test_window_bounds_what_is_in_flight() -> None:
    pair = Pair(network=Network(delay_s=(0.1, 0.1)))
    pair.whole(R, 20)
    for _ in range(20):
        pair.run(0.05)
        assert pair.sender.bytes_in_flight <= 400
    pair.run(2.0)
    pair.check_delivered(R)
    pair.check_settled()


def test_a_peer_may_ask_for_a_smaller_window() -> None:
    sender = TransferSender(block_bytes=100, window_bytes=800)
    sender.open(offer_of(R, 6), D, list(range(6)), 0.0)
    sender.receive(Accept(*R, tuple(range(6)), 250), D.worker, 0.0)
    sender.prompt_computed(handover_of(R, 6), 0.0)
    assert len(sender.pump(0.0)) == 2


def test_a_slow_peer_delays_only_itself() -> None:
    """BR-130."""
    pair = Pair()
    slow, fast = key("slow"), key("fast")
    pair.drop = lambda m: isinstance(m, Credit) and m.key == slow
    pair.whole(slow, 12)
    pair.open(fast, 12, D1)
    pair.finish(fast)
    pair.run(0.2)
    pair.check_delivered(fast, D1)
    assert slow in pair.sender
    pair.run(30.0)
    pair.check_delivered(slow)
    pair.check_settled()


# ---------------------------------------------------------------- messages lost


@pytest.mark.parametrize("kind", [Offer, Accept, Block, Credit, Handover, Delivered])
@pytest.mark.parametrize("count", [1, 2])
def test_one_kind_of_message_is_lost(kind: type[AboutRequest], count: int) -> None:
    pair = Pair()
    left = [count]

    def drop(message: object) -> bool:
        lost = isinstance(message, kind) and left[0] > 0
        left[0] -= lost
        return lost

    pair.drop = drop
    pair.whole(R, 16)
    pair.run(12.0)
    assert left == [0]
    pair.check_delivered(R)
    assert failures(pair) == []
    pair.check_settled()


def test_credits_lost_during_a_long_prompt_do_not_close_the_window() -> None:
    """The prompt still computes, so the transfer as a whole moves; its frames in flight do not."""
    pair = Pair()
    pair.open(R, 40)
    pair.run(0.01)
    pair.drop = lambda m: isinstance(m, Credit) and pair.now < 0.5
    for step in range(20):
        pair.compute(R, step + 1)
        pair.run(0.4)
    assert pair.receiving.receiver and len({m.index for m in pair.log if isinstance(m, Block)}) > 8
    pair.finish(R)
    pair.run(8.0)
    pair.check_delivered(R)
    pair.check_settled()


def test_a_repeated_handover_does_not_put_off_asking_for_a_lost_block() -> None:
    receiver = TransferReceiver(block_bytes=100)
    receiver.accept(R, P, [0, 1], 0, 2, 0.0)
    receiver.block(Block(*R, 0, 0, 0, 100), P, True, 0.1)
    receiver.handed_over(handover_of(R, 2), 0.2)
    receiver.handed_over(handover_of(R, 2), 1.1)
    effects, lost = receiver.expire(1.3)
    assert [e.message for e in effects] == [Nack(*R, (1,), "did not arrive")] and lost == []  # type: ignore[union-attr]


def test_BR_019_a_doubled_offer_after_the_end_is_called_back_at_once() -> None:
    """Without an answer its blocks would stay reserved there until the receiver's limit."""
    pair = Pair()
    pair.open(R, 3)
    pair.run(0.01)
    pair.carry(pair.sender.cancel(R, "client left", pair.now))
    pair.run(0.01)
    pair.check_settled()
    pair._to_end(pair.receiving, offer_of(R, 3))  # the copy comes now
    assert pair.receiving.held
    pair.run(0.05)
    pair.check_settled()


# ---------------------------------------------------------------- bad frames


def test_who_hears_that_all_is_delivered_needs_no_credit_for_the_last_blocks() -> None:
    """It would come after the end, and be counted as late, at every transfer."""
    pair = Pair()
    pair.whole(R, 3)
    pair.run(0.1)
    pair.check_delivered(R)
    assert pair.said(Block) == 3 and pair.said(Delivered) == 1 and pair.said(Credit) == 0
    pair.check_settled()


def test_a_bad_frame_is_asked_for_again_and_never_written() -> None:
    pair = Pair(seed=3, network=Network(corrupt=0.3))
    pair.whole(R, 12)
    pair.run(20.0)
    assert pair.said(Nack) >= 1
    if not failures(pair):
        pair.check_delivered(R)
    pair.check_settled()


def test_a_frame_that_is_bad_each_time_fails_the_transfer() -> None:
    pair = Pair(network=Network(corrupt=1.0))
    pair.whole(R, 1)
    pair.run(20.0)
    assert pair.said(Block) == MAX_NACKS + 1
    assert len(failures(pair)) == 1 and "did not arrive" in failures(pair)[0]
    assert R not in pair.receiving.done
    pair.check_settled()


def test_doubled_nacks_for_one_loss_count_once() -> None:
    sender = TransferSender(block_bytes=100)
    sender.open(offer_of(R, 2), D, [0, 1], 0.0)
    sender.receive(Accept(*R, (0, 1), 1000), D.worker, 0.0)
    sender.prompt_computed(handover_of(R, 2), 0.0)
    sender.pump(0.0)
    for _ in range(5):
        assert sender.receive(Nack(*R, (1,), "checksum"), D.worker, 0.1)[1] == []
    assert len([e for e in sender.pump(0.2) if type(e).__name__ == "SendBlock"]) == 1


def test_BR_018_frames_of_nobodys_transfer_are_credited_and_dropped() -> None:
    """A late writer cannot touch a block."""
    receiver = TransferReceiver(block_bytes=100)
    stranger = Block(*key("other"), 0, 0, 0, 100)
    assert receiver.block(stranger, P, True, 0.0) is None
    receiver.accept(R, P, [7], 0, 1, 0.0)
    assert receiver.block(Block(*R, 0, 0, 0, 100), D1.worker, True, 0.0) is None, "not its sender"
    assert receiver.block(Block(*R, 5, 0, 0, 100), P, True, 0.0) is None, "not wanted"
    assert receiver.block(Block(*R, 0, 1, 0, 100), P, True, 0.0) is None, "no such part"
    assert receiver.nack(Block(*R, 5, 0, 0, 100), P, "checksum") == []
    assert receiver.block(Block(*R, 0, 0, 0, 100), P, True, 0.0) == 7
    assert receiver.block(Block(*R, 0, 0, 0, 100), P, True, 0.0) is None, "it is here"
    credited = [m for e in receiver.flush() if isinstance(m := e.message, Credit)]  # type: ignore[union-attr]
    assert sum(len(credit.indices) for credit in credited) == 6
    assert receiver.flush() == []


@pytest.mark.parametrize("index", [6, 1000])
def test_a_peer_that_wants_what_there_is_not_gets_what_there_is(index: int) -> None:
    sender = TransferSender(block_bytes=100)
    sender.open(offer_of(R, 2), D, [0, 1], 0.0)
    sender.receive(Accept(*R, (1, index, 0, 1), 1000), D.worker, 0.0)
    sender.receive(Nack(*R, (index,), "did not arrive"), D.worker, 0.0)
    sender.prompt_computed(handover_of(R, 2), 0.0)
    assert [e.index for e in sender.pump(0.0) if type(e).__name__ == "SendBlock"] == [0, 1]  # type: ignore[union-attr]


def test_blocks_leave_by_the_message_and_not_one_for_each_credit() -> None:
    """1 the window fills  2 one is credited: nothing goes  3 a message is: it goes  4 the last go when they fit."""
    sender = TransferSender(block_bytes=100, window_bytes=2400)
    sender.open(offer_of(R, 34), D, list(range(34)), 0.0)
    sender.receive(Accept(*R, tuple(range(34)), 2400), D.worker, 0.0)
    sender.prompt_computed(handover_of(R, 34), 0.0)

    def sent_after(*credited: int) -> list[int]:
        sender.receive(Credit(*R, credited), D.worker, 0.0)
        return [effect.index for effect in sender.pump(0.0) if isinstance(effect, SendBlock)]

    assert sent_after() == list(range(24))
    assert sent_after(0) == [] and sent_after(*range(1, 5)) == []
    assert sent_after(5) == list(range(24, 30))
    assert sent_after(6, 7, 8) == [] and sent_after(9) == [30, 31, 32, 33]


def test_a_small_window_is_used_though_the_credit_of_a_message_is_lost() -> None:
    sender = TransferSender(block_bytes=100, window_bytes=400)
    sender.open(offer_of(R, 20), D, list(range(20)), 0.0)
    sender.receive(Accept(*R, tuple(range(20)), 400), D.worker, 0.0)
    sender.blocks_computed(R, 20, 0.0)
    assert len(sender.pump(0.0)) == 4
    for index in (1, 2, 3):  # that of block 0 is lost
        sender.receive(Credit(*R, (index,)), D.worker, 0.0)
        assert len(sender.pump(0.0)) == 1


# ---------------------------------------------------------------- given up, moved on

PHASES = ["offered", "accepted", "sending", "handed over"]


def bring_to(pair: Pair, phase: str) -> None:
    """The transfer R of 6 blocks stands in `phase` at the sender; frames in flight are not answered."""
    if phase == "offered":
        pair.drop = lambda m: isinstance(m, Accept)
    if phase == "sending":
        pair.drop = lambda m: isinstance(m, Credit)
    if phase == "handed over":
        pair.drop = lambda m: isinstance(m, Delivered)
    pair.open(R, 6)
    pair.run(0.01)
    if phase == "sending":
        pair.compute(R, 5)
    if phase == "handed over":
        pair.finish(R)
    pair.run(0.01)
    pair.drop = lambda m: False


@pytest.mark.parametrize("phase", PHASES)
def test_BR_019_cancelled_by_the_sender(phase: str) -> None:
    pair = Pair()
    bring_to(pair, phase)
    pair.carry(pair.sender.cancel(R, "client left", pair.now))
    assert pair.sender.bytes_in_flight == 0
    assert pair.sender.cancel(R, "again", pair.now) == []
    pair.run(0.05)
    assert pair.said(Cancel) == pair.said(Cancelled) == 1, "answered, once"
    pair.check_settled()


def test_cancel_is_said_three_times_and_then_left_to_the_receivers_limit() -> None:
    pair = Pair()
    bring_to(pair, "accepted")
    pair.drop = lambda m: isinstance(m, Cancel)
    pair.carry(pair.sender.cancel(R, "client left", pair.now))
    pair.run(10.0)
    assert pair.said(Cancel) == 3 and pair.sender.settled
    assert pair.receiving.held, "nobody has told it"
    pair.run(45.0)
    pair.check_settled()


@pytest.mark.parametrize("phase", PHASES[:3])
def test_revoked_and_offered_again(phase: str) -> None:
    pair = Pair()
    bring_to(pair, phase)
    if R in pair.receiving.receiver:
        pair.carry(pair.receiving.receiver.revoke(R, "out of blocks"), D.worker)
        del pair.receiving.held[R]
    pair.finish(R)
    pair.run(6.0)
    pair.check_delivered(R)
    pair.check_settled()


def test_doubled_revokes_do_no_more_than_one() -> None:
    pair = Pair()
    bring_to(pair, "accepted")
    pair._to_sender(Revoke(*R, "x"), D.worker)
    pair._to_sender(Revoke(*R, "x"), D.worker)
    pair.finish(R)
    pair.run(8.0)
    pair.check_delivered(R)
    pair.check_settled()


@pytest.mark.parametrize("phase", PHASES[:3])
def test_rebound_to_another_worker(phase: str) -> None:
    pair = Pair()
    bring_to(pair, phase)
    pair.carry(pair.sender.rebind(R, D1, pair.now))
    assert pair.sender.rebind(R, D1, pair.now) == [], "doubled"
    pair.finish(R)
    pair.run(6.0)
    pair.check_delivered(R, D1)
    assert R not in pair.receiving.done
    pair.check_settled()


def test_what_the_old_worker_still_says_after_a_rebind_changes_nothing() -> None:
    pair = Pair()
    bring_to(pair, "accepted")
    pair.carry(pair.sender.rebind(R, D1, pair.now))
    for late in (
        Revoke(*R, "x"),
        Delivered(*R),
        Accept(*R, (0,), 1000),
        Nack(*R, (0,), "x"),
        Credit(*R, (0,)),
    ):
        pair._to_sender(late, D.worker)
    assert R in pair.sender and pair.events == []
    pair.finish(R)
    pair.run(6.0)
    pair.check_delivered(R, D1)
    pair.check_settled()


def test_refused_fails_at_once() -> None:
    pair = Pair()
    pair.receiving.shut = True
    pair.whole(R, 3)
    pair.run(0.05)
    assert failures(pair) == ["refused by decode-0: draining"]
    pair.check_settled()


def test_later_is_asked_again_until_there_is_room() -> None:
    pair = Pair()
    first, second = key("a"), key("b")
    pair.receiving.room = 4
    pair.open(first, 4)
    pair.run(0.01)
    pair.whole(second, 3)
    for _ in range(10):  # longer than the sender's limit: a full worker is not a dead one
        pair.run(5.0)
        pair.compute(first, 1)
    assert second in pair.sender and failures(pair) == []
    pair.carry(pair.sender.cancel(first, "client left", pair.now))
    pair.run(0.3)
    pair.check_delivered(second)
    pair.check_settled()


def test_later_for_ever_is_an_end_too() -> None:
    pair = Pair()
    pair.receiving.room = 0
    pair.whole(R, 3)
    pair.run(200.0)
    assert len(failures(pair)) == 1
    pair.check_settled()


def test_a_silent_peer_is_given_up_after_the_senders_limit() -> None:
    pair = Pair(timeout_s=5.0)
    pair.drop = lambda m: not isinstance(m, (Cancel, Cancelled))
    pair.whole(R, 3)
    pair.run(4.9)
    assert failures(pair) == []
    pair.run(0.2)
    assert failures(pair) == ["no progress for 5 s"]
    pair.run(1.0)
    pair.check_settled()


def test_a_long_prompt_is_not_a_silent_peer() -> None:
    pair = Pair(timeout_s=5.0)
    pair.open(R, 30)
    for chunk in range(30):
        pair.run(3.0)
        pair.compute(R, chunk + 1)
    pair.finish(R)
    pair.run(1.0)
    pair.check_delivered(R)
    assert failures(pair) == []
    pair.check_settled()


def test_BR_001_the_receivers_limit_is_longer_than_the_senders() -> None:
    """Held blocks have a deadline; the sender has given up before, so its next try meets a clean table."""
    pair = Pair()
    pair.open(R, 3)
    pair.run(0.01)
    pair.drop = lambda m: True  # the sender is gone
    pair.run(31.0)
    assert len(failures(pair)) == 1 and pair.receiving.held
    pair.run(15.0)
    pair.check_settled()


# ---------------------------------------------------------------- everything at once


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.4),
    st.floats(0.0, 0.05),
    st.sampled_from([0.002, 0.1, 0.7]),
)
def test_whatever_the_network_does(
    seed: int, lose: float, double: float, corrupt: float, late_s: float
) -> None:
    """Every transfer is delivered once with the right content, or fails at the sender; then nothing is left."""
    network = Network(lose=lose, double=double, corrupt=corrupt, delay_s=(0.0005, late_s))
    pair = Pair(seed=seed, network=network)
    random = pair.random
    keys = [key(f"r{index}") for index in range(6)]
    cancelled = set()
    for which in keys:
        blocks = random.randint(1, 9)
        pair.receiving.hits[which] = random.choice((0, 0, 2, 9))
        pair.open(which, blocks)
        pair.run(random.uniform(0, 0.5))
        for count in range(blocks):
            if random.random() < 0.5:
                pair.compute(which, count)
            pair.run(random.uniform(0, 0.1))
        if random.random() < 0.15:
            pair.carry(pair.sender.cancel(which, "client left", pair.now))
            cancelled.add(which)
        elif random.random() < 0.15:
            pair.carry(pair.sender.rebind(which, D1, pair.now))
        if random.random() < 0.1 and which in pair.receiving.receiver:
            pair.carry(pair.receiving.receiver.revoke(which, "out of blocks"), D.worker)
            del pair.receiving.held[which]
        pair.finish(which)
    pair.run(60.0)
    pair.network.lose = pair.network.corrupt = 0.0
    pair.run(120.0)
    sent = {event.key for event in pair.events if isinstance(event, Sent)}
    failed = {event.key for event in pair.events if isinstance(event, SendFailed)}
    assert sent | failed | cancelled == set(keys) and not sent & failed
    assert len(pair.events) == len(sent) + len(failed), "one end each"
    for end in pair.ends.values():
        for which, content in end.done.items():
            assert content == [(which[0], index) for index in range(pair.blocks[which])]
        assert all(times == 1 for times in end.times_done.values())
    assert all(which in pair.receiving.done or which in pair.ends[D1.worker].done for which in sent)
    pair.check_settled()


@pytest.mark.parametrize("station", ["offered", "sending", "handed over"])
def test_BR_032_what_was_under_way_to_a_peer_that_is_gone_fails_at_once(station: str) -> None:
    """And only that: a transfer to another peer goes on. Nothing waits for the limit of 30 s."""
    pair = Pair()
    pair.drop = lambda message: station == "offered" or isinstance(message, Handover)
    pair.open(key("a"), 3)
    pair.run(0.1)
    if station != "offered":
        pair.compute(key("a"), 2)
        pair.run(0.1)
    if station == "handed over":
        pair.finish(key("a"))
        pair.run(0.1)
    pair.drop = lambda message: False
    pair.whole(key("b"), 2, D1)
    effects, events = pair.sender.peer_gone(D.worker, pair.now)
    assert events == [SendFailed(key("a"), "unreachable", "decode-0 cannot be reached")]
    assert pair.sender.peer_gone(D.worker, pair.now) == ([], [])
    pair.carry(effects)
    pair.run(5.0)
    pair.check_delivered(key("b"), D1)
    pair.check_settled()
