"""A decode worker by its messages and frames: what it answers, says and keeps in every phase of a request."""

from __future__ import annotations

import pytest

from common.batching import BatchingCore
from common.effects import Effect, ToCoordinator, ToFront, ToSender
from common.lifecycle import Phase
from common.messages import (
    Abort,
    Accept,
    Accepted,
    Block,
    Cancel,
    Cancelled,
    Decode,
    Delivered,
    Ended,
    Handover,
    Later,
    Message,
    Nack,
    Offer,
    Refused,
    Revoke,
    Started,
    Stop,
    Tokens,
)
from common.request import Key, Request, RequestId, WorkerId, pack_ids
from decode_node.worker import DecodeWorker
from tests.common.stepping import (
    BLOCK,
    COORDINATOR,
    attempt,
    check_whole,
    expected,
    make_core,
    model_for,
    prompt,
    request,
)
from transfer.in_flight import WINDOW_BYTES
from transfer.receiver import TransferReceiver

P = WorkerId("prefill-0")
Q = WorkerId("prefill-1")
BLOCK_BYTES = 100
MOVED = 'kv_transfer_bytes_total{channel="tcp"}'


class Bench:
    def __init__(
        self, core: BatchingCore | None = None, max_waiting: int = 256, vocab_size: int | None = None
    ) -> None:
        self.core = core or make_core()
        self.receiver = TransferReceiver(block_bytes=BLOCK_BYTES)
        self.worker = DecodeWorker(
            self.core,
            self.receiver,
            fingerprint="fp",
            block_bytes=BLOCK_BYTES,
            max_waiting=max_waiting,
            vocab_size=vocab_size,
        )
        self.model = model_for(self.core)
        self.now = 0.0

    def hear(self, message: Message, sender: WorkerId = COORDINATOR) -> list[Message]:
        return self.note(self.worker.handle(message, sender, self.now))

    def note(self, effects: list[Effect]) -> list[Message]:
        return [
            effect.message for effect in effects if isinstance(effect, (ToCoordinator, ToFront, ToSender))
        ]

    def turn(self) -> list[Message]:
        return self.note(self.worker.turn(self.now))

    def step(self) -> list[Message]:
        self.now += 0.1
        batch = self.worker.schedule(self.now)
        said = self.turn()
        if batch is not None:
            said += self.note(self.worker.finish(batch, self.model.run(batch), 0.1, self.now))
        return said + self.turn()

    def offer(
        self, wanted: Request, number: int = 1, sender: WorkerId = P, fingerprint: str = "fp"
    ) -> list[Message]:
        return self.hear(offer_of(wanted, number, fingerprint), sender)

    def frames(self, wanted: Request, indices: list[int], *, good: bool = True, sender: WorkerId = P) -> None:
        ids = prompt(wanted.prompt_tokens)
        for index in indices:
            header = Block(wanted.request_id, attempt(), index, 0, 0, BLOCK_BYTES)
            block = self.worker.block(header, sender, good, self.now)
            if block is not None:
                self.model.content[block] = ids[index * BLOCK : (index + 1) * BLOCK]

    def hand_over(self, wanted: Request, sender: WorkerId = P) -> list[Message]:
        return self.hear(handover_of(wanted), sender) + self.turn()

    def owned(self, wanted: Request) -> Key:
        """Through a whole transfer."""
        (accept,) = self.offer(wanted)
        assert isinstance(accept, Accept)
        self.frames(wanted, list(accept.wanted))
        said = self.hand_over(wanted)
        assert only(said, Delivered)
        return accept.key

    def check_empty(self) -> None:
        assert self.worker.idle and self.receiver.settled and self.worker.live_keys() == []
        assert not self.worker._senders and not self.worker._moved_bytes
        check_whole(self.core)


def offer_of(wanted: Request, number: int = 1, fingerprint: str = "fp") -> Offer:
    return Offer(wanted.request_id, attempt(number), wanted, b"", wanted.prompt_tokens, b"", fingerprint)


def handover_of(wanted: Request, number: int = 1) -> Handover:
    first = expected(prompt(wanted.prompt_tokens), 1)
    blocks = -(-wanted.prompt_tokens // BLOCK)
    return Handover(wanted.request_id, attempt(number), pack_ids(first), None, blocks, 0)


def only(messages: list[Message], *kinds: type[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kinds)]


A = request("a", prompt(10), 4)
KEY: Key = (A.request_id, attempt())


def test_story_of_a_request() -> None:
    """1 offered, accepted  2 blocks  3 handed over: delivered, started, first token repeated  4 tokens  5 ended."""
    bench = Bench()
    assert bench.offer(A) == [Accept(*KEY, (0, 1, 2), WINDOW_BYTES)]
    bench.frames(A, [0, 1, 2])
    said = bench.hand_over(A)
    assert only(said, Delivered, Started) == [Delivered(*KEY), Started(*KEY, "decode_ready")]
    rows = [row for m in said if isinstance(m, Tokens) for row in m.rows]
    ends: list[Message] = []
    while not bench.worker.idle:
        said = bench.step()
        rows += [row for m in said if isinstance(m, Tokens) for row in m.rows]
        ends += only(said, Ended)
    assert [(row.first, list(row.ids)) for row in rows] == [
        (i, [t]) for i, t in enumerate(expected(prompt(10), 4))
    ]
    assert [row.finish for row in rows] == [None, None, None, "length"]
    (ended,) = ends
    assert isinstance(ended, Ended) and (ended.outcome, ended.transferred_bytes) == ("finished", 300)
    assert bench.worker.records.counters.values[MOVED] == 300
    bench.check_empty()


def test_BR_013_blocks_of_the_second_like_request_are_here_already() -> None:
    """Only the last, incomplete one is wanted; of a block-aligned prompt none is."""
    bench = Bench()
    key = bench.owned(A)
    bench.hear(Abort(*key, "left"))
    like = request("b", prompt(10), 4)
    (accept,) = bench.offer(like)
    assert isinstance(accept, Accept) and accept.wanted == (2,)
    bench.hear(Abort(*accept.key, "left"))
    aligned = request("c", prompt(8), 4)
    (accept,) = bench.offer(aligned)
    assert isinstance(accept, Accept) and accept.wanted == ()
    assert only(bench.hand_over(aligned), Delivered)
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


@pytest.mark.parametrize("repeat", [Offer, Handover])
def test_repeated_after_delivery_means_delivered(repeat: type[Message]) -> None:
    """The sender's view is behind, also when the answer has ended meanwhile."""
    bench = Bench()
    bench.owned(A)
    message = offer_of(A) if repeat is Offer else handover_of(A)
    assert bench.hear(message, P) == [Delivered(*KEY)]
    while not bench.worker.idle:
        bench.step()
    assert bench.hear(message, P) == [Delivered(*KEY)]
    bench.check_empty()


def test_a_repeated_offer_gets_the_same_answer_and_no_second_reservation() -> None:
    bench = Bench()
    (first,) = bench.offer(A)
    held = bench.core.pool.held
    assert bench.offer(A) == [first] and bench.core.pool.held == held
    (refused,) = bench.offer(A, sender=Q)
    assert isinstance(refused, Refused), "another sender of the same attempt is not ours"
    assert bench.hear(handover_of(A), Q) == [Refused(*KEY, "taken already")]
    assert bench.hear(Cancel(*KEY, "x"), Q) == [Cancelled(*KEY)] and bench.core.pool.held == held
    bench.hear(Cancel(*KEY, "x"), P)
    bench.check_empty()


@pytest.mark.parametrize(
    "wanted, fingerprint, reason",
    [
        (A, "other", "fingerprint other differs from fp"),
        (request("a", prompt(200), 57), "fp", "needs 65 blocks, this worker has 64"),
        (request("a", []), "fp", "the prompt is empty"),
    ],
)
def test_what_can_never_be_taken_is_refused(wanted: Request, fingerprint: str, reason: str) -> None:
    """BR-053, BR-144: also an answer that would outgrow the pool, which could only be preempted for ever."""
    bench = Bench()
    assert bench.offer(wanted, fingerprint=fingerprint) == [Refused(*KEY, reason)]
    if fingerprint == "fp":
        assert bench.hear(Decode(*KEY, wanted, b"")) == [Refused(*KEY, reason)]
    bench.check_empty()


@pytest.mark.parametrize("wrong", [-1, 500])
def test_a_prompt_of_no_vocabulary_is_refused(wrong: int) -> None:
    """No forward pass would refuse it here: blocks that come from another are not computed."""
    bench = Bench(vocab_size=500)
    refusal = [Refused(*KEY, "the prompt has ids outside the vocabulary of 500")]
    strange = request("a", [0, wrong, 499], 4)
    assert bench.offer(strange) == refusal and bench.hear(Decode(*KEY, strange, b"")) == refusal
    bench.check_empty()
    (accept,) = bench.offer(request("a", [0, 499], 4))
    assert isinstance(accept, Accept)


def test_no_room_means_later() -> None:
    bench = Bench(make_core(6))
    key = bench.owned(A)
    large = request("b", prompt(12, 900), 4)
    (answer,) = bench.offer(large)
    assert isinstance(answer, Later)
    bench.hear(Abort(*key, "left"))
    (answer,) = bench.offer(large)
    assert isinstance(answer, Accept)
    bench.hear(Cancel(*answer.key, "left"), P)
    bench.check_empty()


def test_a_bad_frame_is_nacked_not_counted_and_not_written() -> None:
    bench = Bench()
    bench.offer(A)
    bench.frames(A, [0], good=False)
    assert only(bench.turn(), Nack) == [Nack(*KEY, (0,), "checksum or size is wrong")]
    counters = bench.worker.records.counters.values
    assert counters["kv_checksum_failures_total"] == 1 and MOVED not in counters
    assert bench.hand_over(A) == []
    bench.frames(A, [0, 1, 2])
    assert only(bench.turn(), Delivered)
    bench.hear(Abort(*KEY, "left"))
    bench.check_empty()


def test_BR_024_nothing_uncertain_is_published() -> None:
    """Cancelled half way, the next like request wants every block."""
    bench = Bench()
    bench.offer(A)
    bench.frames(A, [0, 1])
    bench.turn()
    bench.hear(Cancel(*KEY, "left"), P)
    assert bench.core.pool.cached == 0
    (accept,) = bench.offer(request("b", prompt(10), 4))
    assert isinstance(accept, Accept) and accept.wanted == (0, 1, 2)
    bench.hear(Cancel(*accept.key, "left"), P)
    bench.check_empty()


def test_a_cancelled_transfer_may_be_offered_again() -> None:
    bench = Bench()
    bench.offer(A)
    assert bench.hear(Cancel(*KEY, "rebound"), P) == [Cancelled(*KEY)]
    bench.check_empty()
    bench.owned(A)
    assert bench.hear(Cancel(*KEY, "late copy"), P) == [Cancelled(*KEY)]
    assert bench.worker.live_keys() == [KEY], "what is delivered is ours"
    bench.hear(Abort(*KEY, "left"))
    bench.check_empty()


@pytest.mark.parametrize("output_ids", [b"", pack_ids([1, 2])])
def test_a_handover_that_does_not_fit_its_offer_fails_that_request_only(output_ids: bytes) -> None:
    bench = Bench()
    witness = bench.owned(request("w", prompt(10), 3))
    bench.offer(A)
    bench.frames(A, [0, 1, 2])
    said = bench.hear(Handover(*KEY, output_ids, None, 3, 0), P)
    assert [type(m) for m in said] == [Cancel, Ended]
    assert bench.worker.live_keys() == [witness]
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


def test_handover_of_what_is_not_here_is_revoked() -> None:
    bench = Bench()
    assert bench.hear(handover_of(A), P) == [Revoke(*KEY, "not accepted here")]
    bench.check_empty()


def test_BR_149_prompts_computed_again_here_are_counted_by_cause() -> None:
    """1 what came whole costs nothing  2 put out for want of blocks, its prompt is computed again  3 a next attempt
    computes what another worker had  4 a first attempt, collocated, computes nothing twice."""
    name = 'recomputed_prompt_tokens_total{{cause="{}"}}'.format
    bench = Bench(make_core(8, caching=False))
    counted = bench.worker.records.counters.values
    older, newer = request("a", prompt(10), 20), request("b", prompt(9), 12)
    bench.owned(older)
    bench.owned(newer)
    assert not any("recomputed" in counter for counter in counted)
    while not bench.worker.idle:
        bench.step()
    assert counted["num_preemptions_total"] == 1 and counted[name("preemption")] == 9
    bench.hear(Decode(RequestId("c"), attempt(), request("c", prompt(11), 8), pack_ids([1, 2, 3])))
    while not bench.worker.idle:
        bench.step()
    assert counted[name("next_attempt")] == 11
    bench.hear(Decode(RequestId("d"), attempt(), request("d", prompt(12), 2), b""))
    while not bench.worker.idle:
        bench.step()
    assert sum(value for counter, value in counted.items() if "recomputed" in counter) == 20
    bench.check_empty()


def test_reservations_give_way_to_what_runs() -> None:
    bench = Bench(make_core(8))
    bench.owned(request("w", prompt(10), 20))
    (accept,) = bench.offer(request("b", prompt(14), 4))
    assert isinstance(accept, Accept)
    said: list[Message] = []
    while not only(said, Revoke):
        said = bench.step()
    assert only(said, Revoke) == [Revoke(*accept.key, "out of blocks")]
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


def test_BR_001_BR_032_a_sender_that_falls_silent_is_given_up() -> None:
    bench = Bench()
    bench.offer(A)
    bench.frames(A, [0])
    bench.turn()
    deadline = bench.worker.next_deadline()
    assert deadline == 45.0
    bench.now = 45.0
    assert only(bench.turn(), Revoke) == [Revoke(*KEY, "no frame for 45 s")]
    bench.frames(A, [1])
    bench.turn()
    bench.check_empty()


def test_who_is_put_out_of_the_batch_is_said_to_be_and_to_begin_anew() -> None:
    """At once, not with the next heartbeat: an abort in between is counted by that phase."""
    bench = Bench(make_core(8))
    for name in ("w", "b"):
        bench.owned(request(name, prompt(10), 14))
    said: list[Message] = []
    while not bench.worker.idle:
        said += only(bench.step(), Started)
    assert [(m.id, m.phase) for m in said if isinstance(m, Started)] == [
        ("b", "preempted"),
        ("b", "prefilling"),
    ]
    bench.check_empty()


@pytest.mark.parametrize(
    "station", ["reserved", "half there", "delivered", "decoding", "queued", "prefilling"]
)
@pytest.mark.parametrize("command", [Abort, Stop])
def test_ended_by_command_at_every_station(station: str, command: type[Abort] | type[Stop]) -> None:
    bench = Bench()
    wanted = request("a", prompt(40 if station == "prefilling" else 10), 9)
    if station in ("queued", "prefilling"):
        assert bench.hear(Decode(*KEY, wanted, b"")) == [Accepted(*KEY)]
    elif station in ("reserved", "half there"):
        bench.offer(wanted)
    else:
        bench.owned(wanted)
    if station == "half there":
        bench.frames(wanted, [0])
        bench.turn()
    if station in ("decoding", "prefilling"):
        bench.step()
    message = Abort(*KEY, "client left") if command is Abort else Stop(*KEY)
    said = bench.hear(message)
    (ended,) = only(said, Ended)
    assert isinstance(ended, Ended)
    assert ended.outcome == ("aborted" if command is Abort else "finished")
    assert len(only(said, Cancel)) == (1 if station in ("reserved", "half there") else 0)
    assert bench.hear(message) == [ended], "asked again, the same answer"
    bench.turn()
    bench.check_empty()


def test_local_prefill_says_when_it_begins() -> None:
    bench = Bench()
    assert bench.hear(Decode(*KEY, request("a", prompt(40), 3), b"")) == [Accepted(*KEY)]
    assert only(bench.step(), Started) == [Started(*KEY, "prefilling")]
    said: list[Message] = []
    while not bench.worker.idle:
        said += bench.step()
    assert not only(said, Started)
    rows = [row for m in said if isinstance(m, Tokens) for row in m.rows]
    assert [token for row in rows for token in row.ids] == expected(prompt(40), 3)
    assert [row.cached_tokens for row in rows] == [0, None, None]
    bench.check_empty()


def test_a_later_attempt_ends_the_earlier_and_fences_it() -> None:
    bench = Bench()
    bench.owned(A)
    (accepted,) = bench.hear(Decode(A.request_id, attempt(2), A, b""))
    assert accepted == Accepted(A.request_id, attempt(2))
    assert [m.key for m in only(bench.turn(), Ended) if isinstance(m, Ended)] == [KEY]
    (refused,) = bench.offer(A)
    assert isinstance(refused, Refused)
    (answer,) = bench.hear(Decode(*KEY, A, b""))
    assert isinstance(answer, Ended) and answer.outcome == "aborted"
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


def test_draining_takes_nothing_new_and_finishes_the_rest() -> None:
    """An offer is of what was given out before: its KV is on its way here already."""
    bench = Bench()
    bench.owned(A)
    bench.worker.draining = True
    (refused,) = bench.hear(Decode(RequestId("b"), attempt(1), request("b", prompt(5)), b""))
    assert isinstance(refused, Refused) and refused.reason == "draining"
    bench.owned(request("c", prompt(5)))
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


def test_a_row_that_raises_alone_fails_for_good() -> None:
    bench = Bench()
    bad, good = bench.owned(request("bad", prompt(10), 4)), bench.owned(request("good", prompt(10), 4))
    batch = bench.worker.schedule(0.1)
    assert batch is not None
    (ended,) = bench.note(bench.worker.fail_row(batch.rows[0], "ValueError in its step", 0.2))
    assert isinstance(ended, Ended) and (ended.key, ended.retryable) == (bad, False)
    bench.note(bench.worker.finish(batch, bench.model.run(batch), 0.1, 0.2))
    assert bench.worker.live_keys() == [good]
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()


def test_unknown_ids_are_answered() -> None:
    bench = Bench()
    assert bench.hear(Abort(*KEY, "x")) == [Ended(*KEY, outcome="unknown")]
    assert bench.hear(Stop(*KEY)) == [Ended(*KEY, outcome="unknown")]
    assert bench.hear(Cancel(*KEY, "x"), P) == [Cancelled(*KEY)]
    assert bench.worker.abort(KEY, "x", 0.0) == []
    bench.check_empty()


@pytest.mark.parametrize("command", [Abort, Stop])
def test_a_command_that_overtakes_what_it_is_about_ends_it(command: type[Abort] | type[Stop]) -> None:
    """An offer or a dispatch of this attempt that comes after it finds it ended."""
    bench = Bench()
    message = Abort(*KEY, "client left") if command is Abort else Stop(*KEY)
    assert bench.hear(message) == [Ended(*KEY, outcome="unknown")]
    assert bench.offer(A) == [Refused(*KEY, "ended here")]
    assert bench.hear(Decode(*KEY, A, b"")) == [Ended(*KEY, outcome="unknown")]
    bench.check_empty()
    (accept,) = bench.offer(A, number=2)
    assert isinstance(accept, Accept)
    bench.hear(Cancel(*accept.key, "left"), P)
    bench.check_empty()


def test_heartbeat_tells_what_is_held() -> None:
    bench = Bench()
    bench.offer(request("r", prompt(10), 4))
    bench.owned(request("d", prompt(10), 4))
    bench.step()
    beat = bench.worker.heartbeat(0.0)
    assert [(name, phase) for name, _, phase in beat.live] == [("r", "kv_ready"), ("d", "decoding")]
    assert (beat.load.running, beat.load.waiting) == (1, 1)
    assert beat.load.blocks_held == bench.core.pool.held and beat.last_seq == {"front": 2}
    for key in bench.worker.live_keys():
        bench.worker.abort(key, "not wanted", bench.now)
    bench.check_empty()


def test_a_delivery_that_raises_costs_its_own_request_alone() -> None:
    """A move that the table does not hold, met in a turn and not by a message: blocks back, said, the other joins."""
    bench = Bench()
    bad, good = request("bad", prompt(10), 4), request("good", prompt(11), 4)
    for wanted in (bad, good):
        (accept,) = bench.offer(wanted)
        assert isinstance(accept, Accept)
        bench.frames(wanted, list(accept.wanted))
        bench.hear(handover_of(wanted), P)
    seqs = bench.worker._scheduler.held.sequences()
    seqs[0].life.phase = Phase.QUEUED
    ends = {m.key: m for m in bench.turn() if isinstance(m, Ended)}
    assert list(ends) == [seqs[0].key]
    assert (ends[seqs[0].key].outcome, ends[seqs[0].key].retryable) == ("failed", False)
    assert "IllegalMove" in ends[seqs[0].key].reason
    assert bench.worker.live_keys() == [seqs[1].key]
    while not bench.worker.idle:
        bench.step()
    bench.check_empty()
