"""Commands wait for their grammar and nobody else's; each is answered once, whatever comes meanwhile."""

from __future__ import annotations

import pytest

from common.effects import Effect, ToCoordinator, ToSender
from common.messages import (
    Abort,
    Accepted,
    Cancel,
    Decode,
    Ended,
    Handover,
    Later,
    Message,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Stop,
)
from common.request import (
    Attempt,
    FrontId,
    Grammar,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    pack_ids,
)
from transfer.grammar_gate import GrammarGate

COORDINATOR, PEER = WorkerId("coordinator"), WorkerId("prefill-0")
A, B = Grammar("regex", "a"), Grammar("regex", "b")


def address(name: str) -> PeerAddress:
    return PeerAddress(WorkerId(name), Incarnation(1), "c", "d")


def request(name: str, grammar: Grammar | None) -> Request:
    return Request(
        RequestId(name), pack_ids([1]), SamplingParams(max_tokens=4, grammar=grammar), FrontId("f")
    )


def prefill(name: str, grammar: Grammar | None = A, attempt: int = 1, target: str = "decode-0") -> Prefill:
    asked = request(name, grammar)
    return Prefill(asked.request_id, Attempt(attempt), request=asked, output_ids=b"", target=address(target))


def decode(name: str, grammar: Grammar | None = A) -> Decode:
    asked = request(name, grammar)
    return Decode(asked.request_id, Attempt(1), request=asked, output_ids=b"")


def offer(name: str, grammar: Grammar | None = A) -> Offer:
    asked = request(name, grammar)
    return Offer(
        asked.request_id, Attempt(1), request=asked, output_ids=b"", num_tokens=1, hashes=b"", fingerprint="f"
    )


class Bench:
    """A gate, and what the worker behind it has seen and others were told."""

    def __init__(self, gate: GrammarGate | None = None) -> None:
        self.gate = GrammarGate() if gate is None else gate
        self.seen: list[Message] = []
        self.said: list[Effect] = []
        self.compiling: list[Grammar] = []
        self.ready: set[Grammar] = set()

    def take(self, message: Message, sender: WorkerId = COORDINATOR, now: float = 0.0) -> None:
        passes, effects = self.gate.arrived(message, sender, self.ready.__contains__, now)
        if passes:
            self.seen.append(message)
        self.said += effects
        self.compiling += self.gate.wanted()

    def compiled(self, grammar: Grammar, fault: str | None = None) -> None:
        if fault is None:
            self.ready.add(grammar)
        taken, effects = self.gate.compiled(grammar, fault)
        self.seen += [message for message, _ in taken]
        self.said += effects


def test_who_has_no_grammar_never_waits() -> None:
    bench = Bench()
    for message in (
        prefill("p", None),
        decode("d", None),
        offer("o", None),
        Accepted(RequestId("x"), Attempt(1)),
    ):
        bench.take(message)
    assert len(bench.seen) == 4 and not bench.said and not bench.compiling


def test_held_until_compiled_then_in_order_and_the_next_ones_at_once() -> None:
    bench = Bench()
    waiting: list[Message] = [prefill("1"), offer("2"), decode("3")]
    for message in waiting:
        bench.take(message)
    bench.take(decode("other", B))
    assert not bench.seen and bench.compiling == [A, B], "each is compiled once"
    bench.compiled(A)
    assert bench.seen == waiting and len(bench.gate) == 1
    bench.take(decode("4"))
    bench.compiled(B)
    assert bench.seen == [*waiting, decode("4"), decode("other", B)]
    assert not bench.said and len(bench.gate) == 0 and bench.gate.next_deadline() is None


def test_a_refused_grammar_fails_its_requests_for_good() -> None:
    bench = Bench()
    bench.take(prefill("1"))
    bench.take(offer("2"), PEER)
    bench.take(decode("other", B))
    bench.compiled(A, "is bad")
    bench.take(decode("3"))  # known by now
    ended = [effect.message for effect in bench.said if isinstance(effect, ToCoordinator)]
    assert [(one.id, one.outcome, one.reason, one.retryable) for one in ended if isinstance(one, Ended)] == [
        (name, "failed", "its grammar is bad", False) for name in ("1", "2", "3")
    ]
    assert ToSender(PEER, Refused(RequestId("2"), Attempt(1), "its grammar is bad")) in bench.said
    assert len(bench.said) == 4 and not bench.seen and bench.compiling == [A, B]


def test_too_slow_is_refused_and_may_go_elsewhere() -> None:
    bench = Bench(GrammarGate(timeout_s=3))
    bench.take(prefill("1"), now=10.0)
    bench.take(offer("2"), PEER, now=11.0)
    assert bench.gate.next_deadline() == 13.0
    assert bench.gate.expire(12.9) == []
    [first] = bench.gate.expire(13.0)
    assert isinstance(first, ToCoordinator) and isinstance(first.message, Refused)
    [second] = bench.gate.expire(20.0)
    assert isinstance(second, ToSender) and second.worker == PEER and isinstance(second.message, Refused)
    bench.compiled(A)
    assert not bench.seen and len(bench.gate) == 0
    bench.take(prefill("1", attempt=2), now=21.0)
    assert bench.seen == [prefill("1", attempt=2)], "compiled late is compiled"


@pytest.mark.parametrize("word", [Stop, Abort, Cancel])
def test_what_is_ended_while_it_is_held_never_begins(word: type[Message]) -> None:
    bench = Bench()
    bench.take(offer("1"), PEER)
    bench.take(offer("2"), PEER)
    message = Stop(RequestId("1"), Attempt(1)) if word is Stop else word(RequestId("1"), Attempt(1), "r")  # type: ignore[call-arg]
    bench.take(message, PEER)
    assert bench.seen == [message], "the worker answers it as anything it does not hold"
    bench.compiled(A)
    assert bench.seen == [message, offer("2")]


def test_what_one_sender_offers_another_neither_ends_nor_takes_over() -> None:
    """As the receiver holds it with offers that have passed: who came first has it."""
    bench, other = Bench(), WorkerId("prefill-1")
    bench.take(offer("1"), PEER)
    bench.take(Cancel(RequestId("1"), Attempt(1), "r"), other)
    bench.take(offer("1"), other)
    (refused,) = bench.said
    assert isinstance(refused, ToSender) and refused.worker == other and isinstance(refused.message, Refused)
    taken, _ = bench.gate.compiled(A, None)
    assert taken == [(offer("1"), PEER)]


def test_a_doubled_command_is_handed_on_once_with_its_newest_words() -> None:
    bench = Bench()
    bench.take(prefill("1"))
    bench.take(prefill("1", target="decode-1"))
    bench.take(Rebind(RequestId("1"), Attempt(1), address("decode-2")))
    bench.take(prefill("1", attempt=2, target="decode-3"))
    bench.compiled(A)
    assert bench.seen == [prefill("1", target="decode-2"), prefill("1", attempt=2, target="decode-3")]
    rebind = Rebind(RequestId("1"), Attempt(1), address("decode-4"))
    bench.take(rebind)
    assert bench.seen[-1] == rebind


def test_what_is_about_others_passes() -> None:
    bench = Bench()
    bench.take(offer("1"), PEER)
    handover = Handover(
        RequestId("9"), Attempt(1), output_ids=b"", logprobs=None, num_blocks=1, cached_tokens=0
    )
    bench.take(handover, PEER)
    assert bench.seen == [handover]


def test_everything_is_bounded() -> None:
    bench = Bench(GrammarGate(max_held=2, max_faults=2))
    for name in "123":
        bench.take(offer(name), PEER)
    assert len(bench.gate) == 2
    [later] = bench.said
    assert isinstance(later, ToSender) and isinstance(later.message, Later) and later.message.id == "3"
    bench.compiled(A, "is bad")
    for text in "xyz":
        bench.compiled(Grammar("regex", text), "is bad")
    bench.take(offer("4"), PEER)
    assert bench.compiling == [A, A], "pushed out, so tried again"


def test_what_the_compiler_has_pushed_out_is_waited_for_again() -> None:
    bench = Bench()
    bench.take(offer("1"), PEER)
    bench.compiled(A)
    bench.ready.clear()
    bench.take(offer("2"), PEER)
    assert bench.seen == [offer("1")] and bench.compiling == [A, A]


def test_a_worker_that_stops_gets_what_is_held_to_refuse_it() -> None:
    bench = Bench()
    bench.take(offer("1"), PEER)
    assert bench.gate.let_all_go() == [(offer("1"), PEER)]
    bench.compiled(A)
    assert not bench.seen and len(bench.gate) == 0
