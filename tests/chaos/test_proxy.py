"""The proxy itself: what it does not touch arrives as it was said, and what a test asks for happens to nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from common.messages import Block, Cancel, Sender
from common.request import Attempt, Incarnation, RequestId
from common.wire import decode, encode
from tests.chaos.proxy import COORDINATOR, Proxy
from tests.chaos.rules import Rule

ME = Sender("decode-0", Incarnation(1))
WAIT_MS = 5000
A_WHILE_MS = 300


class Pair:
    """A worker's DEALER and the coordinator's ROUTER, with the proxy between."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.proxy = Proxy(f"tcp://127.0.0.1:{port}")
        self.proxy.__enter__()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.IDENTITY, b"decode-0/1")
        self.dealer.connect(self.proxy.control)

    def say(self, *frames: bytes) -> None:
        self.dealer.send_multipart(frames)

    def heard(self, wait_ms: int = WAIT_MS) -> list[bytes] | None:
        return self.router.recv_multipart()[1:] if self.router.poll(wait_ms) else None

    def end(self) -> None:
        self._context.destroy(linger=0)
        self.proxy.__exit__()
        assert self.proxy.faults == []


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.end()


def message(index: int) -> bytes:
    return encode(Cancel(RequestId(f"r{index}"), Attempt(1), "x" * index), ME)


def test_frames_of_every_size_pass_whole_and_in_order(pair: Pair) -> None:
    said = [(bytes(size), message(size)) for size in (0, 1, 255, 256, 400_000)]
    for frames in said:
        pair.say(*frames)
    assert [pair.heard() for _ in said] == [list(frames) for frames in said]
    pair.router.send_multipart([b"decode-0/1", message(3)])
    assert pair.dealer.poll(WAIT_MS) and pair.dealer.recv_multipart() == [message(3)]


@pytest.mark.parametrize(
    ("action", "heard"),
    [("see", [0, 1, 2]), ("drop", [0, 2]), ("double", [0, 1, 1, 2]), ("delay", [0, 2, 1])],
)
def test_one_message_fares_ill_and_no_other(action: Any, heard: list[int], pair: Pair) -> None:
    rule = pair.proxy.add(Rule(action, ("Cancel",), skip=1, delay_s=A_WHILE_MS / 1e3))
    for index in range(3):
        pair.say(message(index))
    assert [pair.heard() for _ in heard] == [[message(index)] for index in heard]
    assert pair.heard(A_WHILE_MS) is None
    assert (rule.seen, rule.acted) == (3, 1)


def test_what_is_held_goes_on_when_it_is_let_go(pair: Pair) -> None:
    rule = pair.proxy.add(Rule("hold", ("Cancel",), times=None))
    pair.say(message(1))
    rule.wait()
    assert pair.heard(A_WHILE_MS) is None
    pair.proxy.let_go(rule)
    pair.say(message(2))
    assert [pair.heard(), pair.heard()] == [[message(1)], [message(2)]]


def test_a_bit_of_a_block_is_wrong_and_its_header_is_not(pair: Pair) -> None:
    pair.proxy.add(Rule("corrupt", ("Block",)))
    header = encode(Block(RequestId("r"), Attempt(1), 0, 0, checksum=5, size=64), ME)
    for _ in range(2):
        pair.say(bytes(64), header)
    damaged, whole = pair.heard(), pair.heard()
    assert whole == [bytes(64), header]
    assert damaged is not None and damaged[1] == header and sum(damaged[0]).bit_count() == 1
    pair.proxy.add(Rule("corrupt", ("Block",)))
    pair.say(b"", header)  # its bytes go another way
    by_name = pair.heard()
    assert by_name is not None and decode(by_name[1]) != decode(header)


def test_a_link_that_is_cut_carries_nothing_until_it_is_restored(pair: Pair) -> None:
    pair.say(message(1))
    assert pair.heard() == [message(1)]
    pair.proxy.cut("decode-0", COORDINATOR)
    pair.say(message(2))
    assert pair.heard(A_WHILE_MS) is None
    pair.proxy.restore()
    pair.say(message(3))  # ZeroMQ keeps it until it has connected again; what was under way is lost
    assert pair.heard() in ([message(2)], [message(3)])


def test_a_stalled_link_brings_all_of_it_late(pair: Pair) -> None:
    pair.say(message(1))
    assert pair.heard() == [message(1)]
    pair.proxy.stall("decode-0", COORDINATOR)
    pair.say(message(2))
    assert pair.heard(A_WHILE_MS) is None
    pair.proxy.restore()
    assert pair.heard() == [message(2)]
