"""A prefill worker by its messages: what it answers, says and keeps in every phase of a request."""

from __future__ import annotations

from typing import Any

import pytest

from common.batching import BatchingCore
from common.effects import Effect, ToCoordinator, ToFront, ToReceiver
from common.messages import (
    Abort,
    Accept,
    Accepted,
    Cancel,
    Cancelled,
    Credit,
    Delivered,
    Ended,
    Handover,
    Later,
    Message,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Revoke,
    Started,
    Stop,
    Tokens,
)
from common.request import Key, WorkerId, pack_ids
from prefill_node.worker import PrefillWorker
from tests.common.stepping import (
    BLOCK,
    CHUNK,
    COORDINATOR,
    OTHER_TARGET,
    TARGET,
    attempt,
    check_whole,
    expected,
    make_core,
    model_for,
    prompt,
    request,
)
from transfer.sender import TransferSender


class Bench:
    def __init__(self, core: BatchingCore | None = None, max_waiting: int = 256) -> None:
        self.core = core or make_core()
        self.sender = TransferSender(block_bytes=100)
        self.worker = PrefillWorker(
            self.core, self.sender, fingerprint="fp", block_bytes=100, max_waiting=max_waiting
        )
        self.model = model_for(self.core)
        self.now = 0.0
        self.effects: list[Effect] = []

    def hear(self, message: Message, sender: WorkerId = COORDINATOR) -> list[Message]:
        """What the worker says at once."""
        return self.note(self.worker.handle(message, sender, self.now))

    def note(self, effects: list[Effect]) -> list[Message]:
        self.effects += effects
        return [
            effect.message for effect in effects if isinstance(effect, (ToCoordinator, ToFront, ToReceiver))
        ]

    def step(self) -> list[Message]:
        self.now += 0.1
        batch = self.worker.schedule(self.now)
        said = self.note(self.worker.turn(self.now))
        if batch is not None:
            said += self.note(self.worker.finish(batch, self.model.run(batch), 0.1, self.now))
        return said + self.note(self.worker.turn(self.now))

    def dispatch(
        self,
        name: str = "a",
        length: int = 20,
        max_tokens: int = 5,
        number: int = 1,
        target: PeerAddress = TARGET,
    ) -> Key:
        wanted = request(name, prompt(length), max_tokens)
        message = Prefill(wanted.request_id, attempt(number), wanted, b"", target)
        assert self.hear(message) == [Accepted(*message.key, target)]
        return message.key

    def accept(self, key: Key, blocks: int, peer: PeerAddress = TARGET) -> list[Message]:
        return self.hear(Accept(*key, tuple(range(blocks)), 10_000), peer.worker)

    def check_empty(self) -> None:
        assert self.worker.idle and self.worker.live_keys() == []
        check_whole(self.core)


def only(messages: list[Message], *kinds: type[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kinds)]


def test_story_of_a_request() -> None:
    """1 accepted  2 first chunk: started, offered  3 accepted there, blocks go  4 last chunk: token, hand-over
    5 delivered: freed into the cache, ended."""
    bench = Bench()
    key = bench.dispatch(length=20)
    said = bench.step()
    assert only(said, Started) == [Started(*key, "prefilling")]
    (offer,) = only(said, Offer)
    assert isinstance(offer, Offer) and (offer.num_tokens, len(offer.hashes)) == (20, 5 * 16)
    bench.accept(key, 5)
    said = bench.step()
    (tokens,) = only(said, Tokens)
    assert isinstance(tokens, Tokens)
    (row,) = tokens.rows
    assert (row.first, list(row.ids), row.finish, row.cached_tokens) == (0, expected(prompt(20), 1), None, 0)
    (handover,) = only(said, Handover)
    assert isinstance(handover, Handover)
    assert (handover.output_ids, handover.num_blocks) == (pack_ids(row.ids), 5)
    assert len([e for e in bench.effects if type(e).__name__ == "SendBlock"]) == 5
    (ended,) = bench.hear(Delivered(*key), TARGET.worker)
    assert isinstance(ended, Ended) and (ended.outcome, ended.blocks) == ("handed_over", 5)
    assert bench.core.pool.cached == 5
    bench.check_empty()


@pytest.mark.parametrize("times", [2, 5])
def test_the_same_dispatch_again_is_answered_again(times: int) -> None:
    bench = Bench()
    key = bench.dispatch()
    again = Prefill(*key, request("a", prompt(20)), b"", TARGET)
    for _ in range(times):
        assert bench.hear(again) == [Accepted(*key, TARGET)]
    assert bench.worker.live_keys() == [key]
    bench.hear(Abort(*key, "left"))
    (answer,) = bench.hear(again)
    assert isinstance(answer, Ended) and answer.outcome == "aborted"
    bench.check_empty()


def test_a_repeated_dispatch_says_which_target_holds() -> None:
    """The coordinator asks again with another target: the answer shows that the first one came through."""
    bench = Bench()
    key = bench.dispatch(target=TARGET)
    again = Prefill(*key, request("a", prompt(20)), b"", OTHER_TARGET)
    assert bench.hear(again) == [Accepted(*key, TARGET)]
    assert bench.hear(Rebind(*key, OTHER_TARGET)) == [Accepted(*key, OTHER_TARGET)]
    said = bench.step()
    assert only(said, Offer)
    assert [e.target for e in bench.effects if isinstance(e, ToReceiver)] == [OTHER_TARGET]
    bench.hear(Abort(*key, "left"))
    bench.check_empty()


def test_a_later_attempt_ends_the_earlier_and_fences_it() -> None:
    bench = Bench()
    first = bench.dispatch(number=1)
    bench.step()
    second = bench.dispatch(number=2)
    assert bench.worker.live_keys() == [second]
    assert [m.key for m in bench.note(bench.worker.turn(bench.now)) if isinstance(m, Ended)] == [first]
    stale = Prefill(*first, request("a", prompt(20)), b"", TARGET)
    (answer,) = bench.hear(stale)
    assert isinstance(answer, Ended) and answer.key == first
    (answer,) = bench.hear(Prefill(first[0], attempt(0), request("a", prompt(20)), b"", TARGET))
    assert answer == Refused(first[0], attempt(0), "a later attempt was dispatched")
    bench.hear(Abort(*second, "left"))
    bench.check_empty()


@pytest.mark.parametrize(
    "length, reason", [(0, "the prompt is empty"), (300, "needs 75 blocks, this worker has 64")]
)
def test_what_can_never_run_is_refused(length: int, reason: str) -> None:
    bench = Bench()
    wanted = request("a", prompt(length))
    (answer,) = bench.hear(Prefill(wanted.request_id, attempt(), wanted, b"", TARGET))
    assert answer == Refused(wanted.request_id, attempt(), reason)
    bench.check_empty()


def test_full_means_later_and_draining_means_no() -> None:
    bench = Bench(max_waiting=1)
    key = bench.dispatch("a")
    wanted = request("b", prompt(5))
    (answer,) = bench.hear(Prefill(wanted.request_id, attempt(), wanted, b"", TARGET))
    assert isinstance(answer, Later)
    bench.worker.draining = True
    (answer,) = bench.hear(Prefill(wanted.request_id, attempt(), wanted, b"", TARGET))
    assert isinstance(answer, Refused)
    assert bench.hear(Prefill(*key, request("a", prompt(20)), b"", TARGET)) == [Accepted(*key, TARGET)]
    bench.hear(Abort(*key, "left"))
    bench.check_empty()


def test_BR_072_an_answer_of_one_token_never_meets_a_decode_worker() -> None:
    bench = Bench()
    key = bench.dispatch(length=20, max_tokens=1)
    said = bench.step() + bench.step()
    assert not only(said, Offer, Handover, Cancel)
    (tokens,) = only(said, Tokens)
    assert isinstance(tokens, Tokens) and tokens.rows[0].finish == "length"
    (ended,) = only(said, Ended)
    assert isinstance(ended, Ended) and (ended.key, ended.outcome) == (key, "finished")
    assert bench.sender.settled
    bench.check_empty()


def test_BR_077_a_next_attempt_goes_on_after_the_tokens_before() -> None:
    """Three of five tokens are out; the next is the fourth, the offer carries three."""
    bench = Bench()
    done = expected(prompt(20), 3)
    wanted = request("a", prompt(20), 5)
    message = Prefill(wanted.request_id, attempt(), wanted, pack_ids(done), TARGET)
    bench.hear(message)
    said = bench.step() + bench.step()
    (offer,), (tokens,) = only(said, Offer), only(said, Tokens)
    assert isinstance(offer, Offer) and isinstance(tokens, Tokens)
    assert (offer.num_tokens, offer.output_ids) == (23, pack_ids(done))
    assert (tokens.rows[0].first, list(tokens.rows[0].ids)) == (3, expected(prompt(20), 4)[3:])
    bench.hear(Abort(*message.key, "left"))
    bench.check_empty()


STATIONS = ["queued", "first chunk", "accepted", "computed", "handed over"]


def bring_to(bench: Bench, station: str) -> Key:
    key = bench.dispatch(length=40)
    if station == "queued":
        return key
    bench.step()
    if station in ("accepted", "handed over"):
        bench.accept(key, 10)
    if station in ("computed", "handed over"):
        bench.step()
        bench.step()
    return key


@pytest.mark.parametrize("station", STATIONS)
@pytest.mark.parametrize("command", [Abort, Stop])
def test_BR_002_BR_017_ended_by_command_at_every_station(
    station: str, command: type[Abort] | type[Stop]
) -> None:
    """Freed at once, answered, the decode worker told; again: the same answer."""
    bench = Bench()
    key = bring_to(bench, station)
    message = Abort(*key, "client left") if command is Abort else Stop(*key)
    said = bench.hear(message)
    (ended,) = only(said, Ended)
    assert isinstance(ended, Ended)
    assert ended.outcome == ("aborted" if command is Abort else "finished")
    assert len(only(said, Cancel)) == (0 if station == "queued" else 1)
    assert bench.core.pool.held == 0
    assert bench.hear(message) == [ended]
    bench.hear(Cancelled(*key), TARGET.worker)
    assert bench.step() == [] and bench.sender.settled
    bench.check_empty()


def test_BR_006_aborted_while_its_step_is_out() -> None:
    """One end, and the late result says nothing to anybody."""
    bench = Bench()
    key = bench.dispatch(length=10)
    batch = bench.worker.schedule(0.1)
    assert batch is not None
    bench.note(bench.worker.turn(0.1))
    assert len(only(bench.hear(Abort(*key, "left")), Ended)) == 1
    assert bench.worker.finish(batch, bench.model.run(batch), 0.1, 0.2) == []
    assert not only(bench.note(bench.worker.turn(0.2)), Tokens, Handover)
    bench.check_empty()


def test_a_row_that_raises_alone_fails_for_good() -> None:
    bench = Bench()
    bad, good = bench.dispatch("bad", 5), bench.dispatch("good", 6)
    batch = bench.worker.schedule(0.1)
    assert batch is not None and len(batch.rows) == 2
    (ended,) = only(bench.note(bench.worker.fail_row(batch.rows[0], "ValueError in its step", 0.2)), Ended)
    assert isinstance(ended, Ended)
    assert (ended.key, ended.outcome, ended.retryable) == (bad, "failed", False)
    bench.note(bench.worker.finish(batch, bench.model.run(batch), 0.1, 0.2))
    assert bench.worker.live_keys() == [good]
    assert bench.worker.fail_row(batch.rows[0], "again", 0.3) == []
    bench.hear(Abort(*good, "left"))
    bench.check_empty()


def test_a_transfer_called_off_by_its_receiver_ends_the_attempt() -> None:
    """It is answered, also when it comes again; the receiver has forgotten it and need not be told so."""
    bench = Bench()
    key = bring_to(bench, "handed over")
    said = bench.hear(Cancel(*key, "aborted there"), TARGET.worker)
    (ended,) = only(said, Ended)
    assert isinstance(ended, Ended) and (ended.outcome, ended.retryable) == ("failed", True)
    assert only(said, Cancel, Cancelled) == [Cancelled(*key)] and bench.sender.settled
    assert bench.hear(Cancel(*key, "aborted there"), TARGET.worker) == [Cancelled(*key)]
    assert bench.worker.records.counters.total("kv_transfer_failures_total") == 0, (
        "it was not wanted any more"
    )
    bench.check_empty()


def test_who_calls_off_what_has_gone_to_another_is_answered_and_changes_nothing() -> None:
    bench = Bench()
    key = bring_to(bench, "accepted")
    bench.hear(Rebind(*key, OTHER_TARGET))
    assert bench.hear(Cancel(*key, "aborted there"), TARGET.worker) == [Cancelled(*key)]
    assert bench.worker.live_keys() == [key] and key in bench.sender
    bench.hear(Abort(*key, "left"))
    bench.check_empty()


def test_BR_010_BR_019_unknown_ids_are_answered() -> None:
    """Late messages are counted, commands answered."""
    bench = Bench()
    key = request("nobody", prompt(1)).request_id, attempt()
    assert bench.hear(Abort(*key, "x")) == [Ended(*key, outcome="unknown")]
    assert bench.hear(Stop(*key)) == [Ended(*key, outcome="unknown")]
    assert bench.hear(Rebind(*key, TARGET)) == [Ended(*key, outcome="unknown")]
    for late in (Delivered(*key), Credit(*key, (0,)), Revoke(*key, "x"), Cancelled(*key)):
        assert bench.hear(late, TARGET.worker) == []
    counted = {n: v for n, v in bench.worker.records.counters.values.items() if n.startswith("late")}
    assert sum(counted.values()) == 7
    bench.check_empty()


@pytest.mark.parametrize("command", [Abort, Stop])
def test_a_command_that_overtakes_its_dispatch_ends_it(command: type[Abort] | type[Stop]) -> None:
    """Out of order, it says what it would say in order: nothing of this attempt is to run."""
    bench = Bench()
    wanted = request("a", prompt(20))
    key = wanted.request_id, attempt()
    message = Abort(*key, "client left") if command is Abort else Stop(*key)
    assert bench.hear(message) == [Ended(*key, outcome="unknown")]
    assert bench.hear(Prefill(*key, wanted, b"", TARGET)) == [Ended(*key, outcome="unknown")]
    bench.check_empty()
    assert bench.dispatch(number=2)[1] == 2, "the next attempt is another matter"
    bench.hear(Abort(key[0], attempt(2), "left"))
    bench.check_empty()


def test_heartbeat_tells_what_is_held() -> None:
    bench = Bench()
    computed = bring_to(bench, "computed")
    queued = bench.dispatch("b", 30)
    beat = bench.worker.heartbeat(0.25)
    assert beat.live == ((*computed, "kv_ready"), (*queued, "queued"))
    assert (beat.load.running, beat.load.waiting, beat.load.queued_tokens) == (0, 1, 30)
    assert (beat.load.blocks_held, beat.load.blocks_free) == (40 // BLOCK, 64 - 40 // BLOCK)
    assert beat.last_seq == {"front": 1} and beat.progress_age_s == 0.25
    assert beat.counters["computed_tokens_total"] == 40 and CHUNK < 40
    for key in (computed, queued):
        bench.note(bench.worker.abort(key, "not wanted", bench.now))
    assert bench.worker.abort(queued, "again", bench.now) == []
    bench.check_empty()


@pytest.mark.parametrize("part", ["_begin", "_after_row"])
def test_over_one_prompt_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """We err as it begins, or over what its chunk came to: it ends, for good, and only it."""
    bench = Bench()
    of = getattr(bench.worker, part)

    def bad(about: Any, now: float) -> Any:
        if getattr(about, "seq", about).key == b:
            raise RuntimeError("over this one")
        return of(about, now)

    monkeypatch.setattr(bench.worker, part, bad)
    a, b, c = (bench.dispatch(name, length=6, max_tokens=1) for name in "abc")
    said = [message for _ in range(3) for message in bench.step()]
    assert {m.key: (m.outcome, m.retryable) for m in only(said, Ended) if isinstance(m, Ended)} == {
        a: ("finished", True),
        b: ("failed", False),
        c: ("finished", True),
    }
    assert len(only(said, Ended)) == 3
    assert bench.worker.records.counters.values["internal_errors_total"] == 1
    bench.check_empty()
