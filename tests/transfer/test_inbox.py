"""Garbage is counted and shuts its sender out for a moment, never for good."""

from __future__ import annotations

import time

import msgpack
import pytest
import zmq

from common.counters import Counters
from common.messages import Abort, Delivered, Sender
from common.request import Attempt, Incarnation, RequestId
from common.wire import encode
from transfer.inbox import MAX_VIOLATIONS, SHUT_OUT_S, Inbox, identity

ME = Sender("decode-0", Incarnation(7))
ROUTE = identity(ME)
MESSAGE = Delivered(RequestId("a"), Attempt(1))
GOOD = encode(MESSAGE, ME)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def inbox(counters: Counters, clock: Clock) -> Inbox:
    return Inbox(counters, clock)


def test_a_message_is_read_with_its_sender(inbox: Inbox, counters: Counters) -> None:
    assert inbox.read(GOOD, ROUTE) == (ME, MESSAGE) and counters.values == {}


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff" * 50, GOOD[:-1]])
def test_garbage_is_counted(inbox: Inbox, counters: Counters, data: bytes) -> None:
    assert inbox.read(data, ROUTE) is None
    assert counters.values == {"protocol_violations_total": 1.0}


@pytest.mark.parametrize("route, words", [(ROUTE, "decode-0/7"), (b"T /v1 Bearer k3y/1", "a stranger")])
def test_only_a_name_of_ours_is_logged(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, route: bytes, words: str
) -> None:
    inbox.read(b"a pr0mpt", route)
    (said,) = caplog.messages
    assert words in said and "k3y" not in said and "pr0mpt" not in said


def test_a_long_name_makes_no_long_line(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    inbox.read(msgpack.packb({"v": ["x" * 100_000]}), ROUTE)
    assert len(caplog.messages[0]) < 300


def test_another_name_than_the_connections_is_a_violation(inbox: Inbox, counters: Counters) -> None:
    assert inbox.read(GOOD, b"decode-0/8") is None
    assert counters.values == {"protocol_violations_total": 1.0}


def test_what_is_left_of_a_connection_that_was_taken_over_is_late_and_no_violation(
    inbox: Inbox, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    """Through a real ROUTER that reads nothing for a while, as that of a process that stood still: whoever speaks to
    it connects again meanwhile."""
    heard = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for number in range(3):
            with context.socket(zmq.DEALER) as one:
                one.setsockopt(zmq.LINGER, 1000)
                one.setsockopt(zmq.IDENTITY, ROUTE)
                one.connect(f"tcp://127.0.0.1:{port}")
                for _ in range(3):
                    one.send(GOOD)
                if number == 0:
                    assert router.recv_multipart() == [ROUTE, GOOD]
            time.sleep(0.2)  # it has left when the next one comes; of one that stands ZeroMQ reads no more
        while router.poll(500):
            route, data = router.recv_multipart()
            heard.append(inbox.read(data, route))
    assert None in heard and set(heard) == {None, (ME, MESSAGE)}
    assert counters.values == {"superseded_messages_total": heard.count(None)} and caplog.messages == []


def test_who_never_gives_a_name_is_heard_of_and_not_heard(inbox: Inbox, counters: Counters) -> None:
    nameless = b"\0\n\xff\0\1"
    for _ in range(MAX_VIOLATIONS):
        assert inbox.read(GOOD, nameless) is None
    assert counters.values == {"superseded_messages_total": float(MAX_VIOLATIONS)}
    assert inbox.read(b"junk", nameless) is None and inbox.read(GOOD, nameless, (Abort,)) is None
    assert counters.values["protocol_violations_total"] == 2
    for stranger in (b"\0abc", b"\0abcde", b"abcde"):
        assert inbox.read(GOOD, stranger) is None
    assert counters.values["protocol_violations_total"] == 5


def test_an_impostor_shuts_the_real_one_out_for_a_moment_only(inbox: Inbox, clock: Clock) -> None:
    for _ in range(MAX_VIOLATIONS + 20):
        inbox.read(b"junk", ROUTE)
    assert inbox.read(GOOD, ROUTE) is None
    assert inbox.read(GOOD, identity(Sender("decode-1", Incarnation(1)))) is None, "a violation of its own"
    other = Sender("decode-1", Incarnation(1))
    assert inbox.read(encode(MESSAGE, other), identity(other)) == (other, MESSAGE)
    clock.now += SHUT_OUT_S
    assert inbox.read(GOOD, ROUTE) == (ME, MESSAGE)


def test_a_good_message_wipes_the_slate(inbox: Inbox) -> None:
    for _ in range(3):
        for _ in range(MAX_VIOLATIONS - 1):
            inbox.read(b"junk", ROUTE)
        assert inbox.read(GOOD, ROUTE) == (ME, MESSAGE)


def test_without_a_route_there_is_nobody_to_shut_out(inbox: Inbox, counters: Counters) -> None:
    for _ in range(2 * MAX_VIOLATIONS):
        assert inbox.read(b"junk") is None
    assert inbox.read(GOOD) == (ME, MESSAGE)
    assert counters.values == {"protocol_violations_total": 2.0 * MAX_VIOLATIONS}


def test_a_handler_that_raises_is_counted_and_the_reader_goes_on(inbox: Inbox, counters: Counters) -> None:
    heard: list[object] = []

    def handle(message: object) -> None:
        if not heard:
            heard.append("raised")
            raise AssertionError("we erred")
        heard.append(message)

    inbox.guard(handle, 1)
    inbox.guard(handle, 2)
    assert heard == ["raised", 2] and counters.values == {"internal_errors_total": 1.0}
