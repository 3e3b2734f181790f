"""Decode scheduling told as numbered stories; each ends with an empty scheduler and a whole pool."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from common.batching import Batch, RowResult
from common.lifecycle import Phase
from common.request import Grammar, Key, pack_ids
from common.sequence import Sequence
from decode_node.chunk_budget import MIN_CHUNK
from decode_node.passing import ASKS_FOR_S, MAX_PASSES
from decode_node.scheduler import DecodeScheduler, Outcome
from tests.common.stepping import (
    BLOCK,
    CHUNK,
    attempt,
    check_whole,
    expected,
    make_core,
    model_for,
    prompt,
    request,
)


class Bench:
    """A scheduler, a virtual model, and what each answer came to."""

    def __init__(
        self, num_blocks: int = 64, *, max_num_seqs: int = 8, caching: bool = True, max_inflight: int = 1
    ) -> None:
        self.core = make_core(num_blocks, max_num_seqs=max_num_seqs, caching=caching)
        self.scheduler = DecodeScheduler(self.core, max_inflight=max_inflight)
        self.model = model_for(self.core)
        self.now = 0.0
        self.answers: dict[Key, list[int]] = {}
        self.wanted: dict[Key, list[int]] = {}
        self.preempted: Counter[Key] = Counter()
        self.revoked: list[Key] = []

    def _expect(self, seq: Sequence, ids: list[int], max_tokens: int) -> Key:
        self.wanted[seq.key] = expected(ids, max_tokens)
        self.answers[seq.key] = []
        return seq.key

    def add(self, name: str, ids: list[int], max_tokens: int = 5, *, priority: int = 0) -> Key:
        """To prefill here."""
        wanted = request(name, ids, max_tokens, priority=priority)
        return self._expect(self.scheduler.add(wanted, attempt(), b"", self.now), ids, max_tokens)

    def reserve(self, name: str, ids: list[int], max_tokens: int = 5, *, priority: int = 0) -> Key | None:
        """An offer; the key if there is room."""
        wanted = request(name, ids, max_tokens, priority=priority)
        seq = self.scheduler.reserve(wanted, attempt(), b"", self.now)
        return None if seq is None else self._expect(seq, ids, max_tokens)

    def deliver(self, key: Key) -> None:
        """The blocks are there (written as the transfer would), with the first token."""
        seq = self.scheduler.held.reserved[key]
        for position, token in enumerate(seq.tokens):
            content = self.model.content[seq.blocks[position // BLOCK]]
            if position >= seq.cached_tokens:
                if position % BLOCK == 0:
                    content.clear()
                content.append(token)
        first = self.wanted[key][0]
        self.scheduler.deliver(key, first, self.now)
        self.answers[key].append(first)

    def transferred(self, name: str, ids: list[int], max_tokens: int = 5) -> Key:
        key = self.reserve(name, ids, max_tokens)
        assert key is not None
        self.deliver(key)
        return key

    def schedule(self) -> Batch | None:
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        self.revoked += self.scheduler.giving_way.revoked
        self.scheduler.giving_way.revoked.clear()
        self.scheduler.started.clear()
        return batch

    def finish(self, batch: Batch) -> list[Outcome]:
        outcomes = list(self.scheduler.finish(batch, self.model.run(batch), self.now))
        for seq, result, finish in outcomes:
            self.answers[seq.key] += result.ids
            if finish is not None:
                self.preempted[seq.key] = seq.preemptions
                self.scheduler.end(seq.key, Phase.FINISHED, self.now)
        return outcomes

    def step(self) -> Batch | None:
        batch = self.schedule()
        if batch is not None:
            self.finish(batch)
        return batch

    def to_the_end(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not len(self.scheduler.held):
                return
            assert self.step() is not None, "idle with somebody waiting"
        raise AssertionError("does not come to an end")

    def check_exact_and_empty(self) -> None:
        assert self.answers == self.wanted
        assert len(self.scheduler.held) == 0 and self.scheduler.held.queued_tokens == 0
        check_whole(self.core)


# ---------------------------------------------------------------- the good path


def test_of_an_answer_few_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the first of each block and the last: a step costs by what changes in it."""
    bench = Bench()
    looked_at: list[int] = []
    take_back = bench.core.take_back

    def noted(batch: Batch, results: Seq[RowResult]) -> list[int]:
        rows = take_back(batch, results)
        looked_at.append(len(rows))
        return rows

    monkeypatch.setattr(bench.core, "take_back", noted)
    bench.add("a", prompt(5), 12)
    bench.to_the_end()
    assert looked_at == [1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    bench.check_exact_and_empty()


def test_story_of_a_transferred_request() -> None:
    """1 reserved with its next token's place  2 delivered  3 joins the next step  4 one token a step  5 ended."""
    bench = Bench()
    key = bench.reserve("a", prompt(8), 6)
    assert key is not None and bench.core.pool.held == 3, "eight tokens and the next one"
    assert bench.step() is None and bench.scheduler.held.get(key) is None and key in bench.scheduler.held
    bench.deliver(key)
    for step in range(5):
        batch = bench.step()
        assert batch is not None and batch.counts == [1] and len(bench.answers[key]) == step + 2
    bench.check_exact_and_empty()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]
)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_BR_072_local_prefill_at_chunk_and_block_boundaries(
    length: int, max_tokens: int, caching: bool
) -> None:
    """Exactly 1, 2, 3 tokens, whatever the prompt's length."""
    bench = Bench(caching=caching)
    bench.add("a", prompt(length), max_tokens)
    bench.to_the_end()
    bench.check_exact_and_empty()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_block_aligned_prompts_with_every_block_here(blocks: int) -> None:
    """BR-062: by transfer nothing is wanted; by local prefill the last token is computed anew."""
    bench = Bench()
    ids = prompt(blocks * BLOCK)
    bench.add("cold", ids)
    bench.to_the_end()
    key = bench.reserve("transferred", ids)
    assert key is not None
    assert bench.scheduler.held.reserved[key].cached_tokens == len(ids)
    bench.deliver(key)
    local = bench.add("local", ids)
    bench.to_the_end()
    assert bench.answers[local] == bench.answers[key]
    bench.check_exact_and_empty()


def test_sequences_join_and_leave_between_steps() -> None:
    bench = Bench()
    bench.transferred("a", prompt(5), 4)
    bench.step()
    bench.transferred("b", prompt(6, 60), 8)
    sizes = []
    while len(bench.scheduler.held):
        batch = bench.step()
        assert batch is not None
        sizes.append(len(batch.rows))
    assert sizes == [2, 2, 1, 1, 1, 1, 1]
    bench.check_exact_and_empty()


def test_a_batch_is_a_delta() -> None:
    """Joined once, grown by the block, left once; a slot that is taken over leaves and joins in one batch."""
    bench = Bench(max_num_seqs=1)
    bench.transferred("a", prompt(6), 11)
    first = bench.schedule()
    assert first is not None and len(first.joined) == 1 and first.left == [] and first.grown == []
    bench.finish(first)
    grown = []
    while len(bench.scheduler.held):
        batch = bench.step()
        assert batch is not None and batch.joined == [] and batch.left == []
        grown += batch.grown
    assert [len(blocks) for _, blocks in grown] == [1, 1]
    bench.transferred("b", prompt(3, 70))
    batch = bench.schedule()
    assert batch is not None and batch.left == [0] and [joined.slot for joined in batch.joined] == [0]
    bench.finish(batch)
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_decodes_first_then_chunks_in_what_is_left() -> None:
    """BR-069: running streams get a token in every step; a full batch leaves a chunk its minimum."""
    bench = Bench(num_blocks=200)
    for number in range(4):
        bench.transferred(f"d{number}", prompt(4, 10 * number), 40)
    bench.step()
    bench.add("long", prompt(100, 1000))
    batch = bench.step()
    assert batch is not None and batch.counts == [1, 1, 1, 1, max(CHUNK - 4, MIN_CHUNK)]
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_ends_with_an_end_id() -> None:
    bench = Bench()
    stop_at = expected(prompt(5), 4)[3]
    wanted = request("a", prompt(5), 50, end_ids=(stop_at,))
    seq = bench.scheduler.add(wanted, attempt(), b"", 0.0)
    bench.wanted[seq.key], bench.answers[seq.key] = expected(prompt(5), 4), []
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_BR_077_a_next_attempt_counts_the_tokens_before() -> None:
    """20 of 50 are out."""
    bench = Bench()
    done = expected(prompt(9), 20)
    seq = bench.scheduler.add(request("a", prompt(9), 50), attempt(2), pack_ids(done), 0.0)
    bench.wanted[seq.key], bench.answers[seq.key] = expected(prompt(9), 50), done
    bench.to_the_end()
    bench.check_exact_and_empty()


# ---------------------------------------------------------------- out of blocks


def test_story_of_preemption() -> None:
    """1 three grow until no block is left  2 the last by arrival is put out  3 the others go on  4 it comes back,
    before anybody new, and its answer is the same (BR-055, BR-057, BR-065)."""
    bench = Bench(num_blocks=12)
    keys = [bench.transferred(name, prompt(6, 100 * n), 20) for n, name in enumerate("abc")]
    while not bench.scheduler.giving_way.preemptions:
        bench.step()
    (out,) = [seq for seq in bench.scheduler.held.sequences() if seq.life.phase is Phase.PREEMPTED]
    assert out.key == keys[2]
    assert bench.reserve("new", prompt(1)) is None, "while somebody waits to come back"
    bench.to_the_end()
    bench.check_exact_and_empty()
    assert bench.preempted[keys[0]] == 0


def test_a_lower_class_is_put_out_first() -> None:
    bench = Bench(num_blocks=8)
    low = bench.add("low", prompt(6), 20, priority=5)
    bench.step()
    high = bench.add("high", prompt(6, 500), 20, priority=0)
    bench.to_the_end()
    assert bench.preempted[low] >= 1 and bench.preempted[high] == 0
    bench.check_exact_and_empty()


def test_a_higher_class_waits_for_nobody_of_a_lower_one_who_was_put_out() -> None:
    """1 two of a low class fill the pool until one is put out  2 an offer of a high class is taken while that one
    waits, one of its own class is not  3 all answers are what they are alone."""
    bench = Bench(num_blocks=14)
    for n, name in enumerate("ab"):
        bench.add(name, prompt(6, 100 * n), 34, priority=5)
    while not bench.scheduler.giving_way.preemptions:
        bench.step()
    assert bench.reserve("low", prompt(1, 300), 2, priority=5) is None
    high = bench.reserve("high", prompt(1, 400), 2, priority=0)
    if high is None:  # no block was left: at the next step they give way
        bench.step()
        high = bench.reserve("high", prompt(1, 400), 2, priority=0)
    assert high is not None
    bench.deliver(high)
    bench.to_the_end()
    assert bench.preempted[high] == 0
    bench.check_exact_and_empty()


def test_those_of_a_lower_class_give_way_to_one_that_asks() -> None:
    """1 a low class holds all  2 a high one is told later  3 at the next step as many are put out as it needs, the last
    first  4 while it asks none of them comes back  5 it is taken, and then they come back."""
    bench = Bench(num_blocks=16)
    low = [bench.add(name, prompt(7, 100 * n), 20, priority=5) for n, name in enumerate("abc")]
    for _ in range(6):
        bench.step()
    assert bench.reserve("high", prompt(20, 900), 6, priority=0) is None
    batch = bench.step()
    assert batch is not None and 0 < bench.scheduler.giving_way.preemptions < 3, "some, not all"
    for _ in range(3):
        assert len(bench.scheduler.giving_way.put_out) == bench.scheduler.giving_way.preemptions
        bench.step()
        assert bench.reserve("lower", prompt(1, 700), priority=7) is None
    high = bench.reserve("high", prompt(20, 900), 6, priority=0)
    assert high is not None
    bench.deliver(high)
    bench.to_the_end()
    assert bench.preempted[high] == 0 and sum(bench.preempted[key] for key in low) > 0
    bench.check_exact_and_empty()


def test_who_does_not_ask_again_is_waited_for_no_longer() -> None:
    """It needs nearly the whole pool, so all give way, and nothing runs: somebody must be told when to look again."""
    bench = Bench(num_blocks=16)
    for n, name in enumerate("abc"):
        bench.add(name, prompt(7, 100 * n), 20, priority=5)
    for _ in range(6):
        bench.step()
    assert bench.reserve("high", prompt(55, 900), 6, priority=0) is None
    assert bench.schedule() is None and bench.scheduler.giving_way.preemptions == 3
    assert bench.scheduler.opens_at == bench.now + ASKS_FOR_S
    bench.now = bench.scheduler.opens_at
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_undelivered_reservations_are_revoked_before_anybody_is_put_out() -> None:
    """The prefill worker still has every block, so nothing is lost; the newest goes first."""
    bench = Bench(num_blocks=12)
    bench.transferred("running", prompt(6), 40)
    early, late = bench.reserve("early", prompt(10, 300)), bench.reserve("late", prompt(10, 400))
    assert early is not None and late is not None
    while not bench.revoked:
        bench.step()
    assert (
        bench.revoked == [late]
        and late not in bench.scheduler.held
        and bench.scheduler.giving_way.preemptions == 0
    )
    while len(bench.revoked) < 2:
        bench.step()
    assert bench.revoked == [late, early]
    del bench.wanted[early], bench.wanted[late], bench.answers[early], bench.answers[late]
    bench.to_the_end()
    assert bench.scheduler.giving_way.preemptions == 0
    bench.check_exact_and_empty()


def test_BR_004_BR_047_delivered_but_not_joined_can_be_put_out_too() -> None:
    """Its KV has come, no slot was free, now its blocks are needed: it recomputes."""
    bench = Bench(num_blocks=9, max_num_seqs=2)
    running = bench.add("running", prompt(6), 26)
    bench.step()
    waits = bench.transferred("waits", prompt(6, 300), 5)
    seq = bench.scheduler.held.get(waits)
    assert seq is not None
    bench.core._free_slots.clear()  # as if the other slot were taken
    while seq.life.phase is not Phase.PREEMPTED:
        bench.step()
    bench.core._free_slots.append(1)
    bench.to_the_end()
    assert bench.preempted[waits] >= 1 and bench.preempted[running] == 0
    bench.check_exact_and_empty()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_each_need_nearly_the_whole_pool(order: tuple[int, int]) -> None:
    bench = Bench(num_blocks=20)
    asks = [(prompt(40), 40), (prompt(60, 500), 20)]
    for index in order:
        ids, max_tokens = asks[index]
        bench.add(f"r{index}", ids, max_tokens)
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_BR_066_steady_pressure_does_not_put_the_same_one_out_again_and_again() -> None:
    """Preemptions per request stay few, and no running row is skipped in any step."""
    bench = Bench(num_blocks=30, max_num_seqs=6)
    for number in range(24):
        bench.add(f"r{number}", prompt(9 + number % 5, 50 * number), 24)
    while len(bench.scheduler.held):
        running = {seq.key for seq in bench.scheduler.held.sequences() if seq.life.phase is Phase.DECODING}
        batch = bench.schedule()
        assert batch is not None
        still = {
            key for key in running if (s := bench.scheduler.held.get(key)) and s.life.phase is Phase.DECODING
        }
        assert still <= {row.key for row in batch.rows}
        bench.finish(batch)
    assert max(bench.preempted.values()) <= 4, bench.preempted
    bench.check_exact_and_empty()


def test_watermark_holds_for_transfers_and_local_prefills() -> None:
    """One block is left for each that runs."""
    bench = Bench(num_blocks=10)
    for number in range(2):
        bench.transferred(f"d{number}", prompt(7, 40 * number), 6)
    bench.step()
    assert bench.core.pool.available == 6
    assert bench.reserve("large", prompt(17, 900)) is None, "would leave one block for two"
    assert bench.core.pool.held == 4, "what was tried was given back"
    bench.add("local", prompt(18, 900), 2)
    bench.step()
    assert bench.scheduler.held.num_local_waiting == 1
    assert bench.reserve("fits", prompt(3, 950)) is not None
    bench.scheduler.end(bench.scheduler.held.keys()[-1], Phase.ABORTED, bench.now)
    bench.wanted.popitem(), bench.answers.popitem()
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_BR_068_a_large_transfer_is_not_passed_for_ever() -> None:
    """It may be overtaken MAX_PASSES times; then room is kept for it, as long as it goes on asking."""
    bench = Bench(num_blocks=20, max_num_seqs=64)
    held = bench.reserve("held", prompt(39))
    assert held is not None
    large = prompt(60, 5000)

    def small(number: int) -> Key | None:
        key = bench.reserve(f"s{number}", prompt(3, number))
        if key is not None:
            bench.scheduler.end(key, Phase.ABORTED, bench.now)
        return key

    taken = 0
    for number in range(MAX_PASSES + 10):
        assert bench.reserve("large", large) is None
        taken += small(number) is not None
    assert taken == MAX_PASSES
    bench.scheduler.end(held, Phase.ABORTED, bench.now)
    assert small(1000) is None and bench.reserve("large", large) is not None
    assert small(1001) is not None
    bench.scheduler.end(bench.scheduler.held.keys()[0], Phase.ABORTED, bench.now)

    again = bench.reserve("held", prompt(70))
    assert again is not None
    for number in range(MAX_PASSES + 10):
        bench.reserve("gone", large)
        small(2000 + number)
    assert small(3000) is None
    bench.now += ASKS_FOR_S + 0.1
    assert small(3001) is not None, "who asks no more is forgotten"
    bench.scheduler.end(again, Phase.ABORTED, bench.now)
    check_whole(bench.core)
    assert len(bench.scheduler.held) == 0


# ---------------------------------------------------------------- going out early

STATIONS = ["reserved", "delivered", "decoding", "waiting", "prefilling", "preempted"]


def bring_to(bench: Bench, station: str) -> Key:
    if station in ("reserved", "delivered", "decoding"):
        key = bench.reserve("x", prompt(10), 30)
        assert key is not None
        if station != "reserved":
            bench.deliver(key)
        if station == "decoding":
            bench.step()
        return key
    if station == "preempted":
        bench.transferred("before", prompt(6, 700), 20)
    key = bench.add("x", prompt(40 if station == "prefilling" else 10), 30)
    while station == "preempted" and not bench.scheduler.giving_way.preemptions:
        bench.step()
    if station == "prefilling":
        bench.step()
    return key


@pytest.mark.parametrize("station", STATIONS)
def test_BR_004_ended_at_every_station(station: str) -> None:
    """Every queue has a way out."""
    bench = Bench(num_blocks=12 if station == "preempted" else 64)
    key = bring_to(bench, station)
    assert bench.scheduler.end(key, Phase.ABORTED, bench.now) is not None
    assert bench.scheduler.end(key, Phase.ABORTED, bench.now) is None
    del bench.wanted[key], bench.answers[key]
    bench.to_the_end()
    bench.check_exact_and_empty()


@pytest.mark.parametrize("station", ["decoding", "prefilling"])
def test_BR_006_ended_while_its_step_is_out(station: str) -> None:
    """Blocks and slot stay until the step is back; the neighbour does not notice."""
    bench = Bench()
    key = bring_to(bench, station)
    bench.transferred("witness", prompt(7, 900), 9)
    batch = bench.schedule()
    assert batch is not None and key in {row.key for row in batch.rows}
    held, slots = bench.core.pool.held, bench.core.free_slots
    bench.scheduler.end(key, Phase.ABORTED, bench.now)
    assert (bench.core.pool.held, bench.core.free_slots) == (held, slots)
    assert {seq.key[0] for seq, _, _ in bench.finish(batch)} == {"witness"}
    del bench.wanted[key], bench.answers[key]
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_what_a_recompute_finds_again_is_not_reported_as_cached() -> None:
    bench = Bench(num_blocks=12)
    for number in range(3):
        bench.add(f"r{number}", prompt(8, 100 * number), 20)
    seqs = bench.scheduler.held.sequences()
    bench.to_the_end()
    assert any(seq.preemptions for seq in seqs)
    assert [seq.cached_tokens for seq in seqs] == [0, 0, 0]
    bench.check_exact_and_empty()


def test_a_local_prefill_is_not_passed_by_transfers_for_ever() -> None:
    """It needs most of the pool, of which transfers that come and go always hold some: after MAX_PASSES of them no
    more are accepted, what is here ends, and it starts. Then transfers are accepted again."""
    bench = Bench(num_blocks=20, max_num_seqs=64)
    before: Key | None = bench.transferred("t", prompt(30, 9000), max_tokens=400)
    large = bench.add("large", prompt(60, 5000), max_tokens=1)
    taken = 0
    for number in range(MAX_PASSES + 10):
        bench.step()
        after = bench.reserve(f"t{number}", prompt(30, 100 * number))
        if before is not None:
            bench.scheduler.end(before, Phase.ABORTED, bench.now)
        if after is not None:
            bench.deliver(after)
            taken += 1
        before = after
    assert taken >= MAX_PASSES, "it is passed, for a while"
    assert len(bench.answers[large]) == 1, "it never starts"
    assert bench.reserve("again", prompt(30)) is not None
    for seq in bench.scheduler.held.sequences():
        bench.scheduler.end(seq.key, Phase.ABORTED, bench.now)
    check_whole(bench.core)


# ---------------------------------------------------------------- two batches out


def ahead_of(bench: Bench) -> tuple[Batch, Batch]:
    """Two steps begun, the second while the first is out."""
    first, second = bench.schedule(), bench.schedule()
    assert first is not None and second is not None
    assert bench.schedule() is None, "two are out"
    return first, second


def test_story_of_a_token_that_nobody_knows_yet() -> None:
    """1 two decode rows go out  2 and again, each for what its own row is about to sample  3 the first comes back, the
    third goes out beside the second  4 nothing is computed past the answer's length."""
    bench = Bench(max_inflight=2)
    bench.transferred("a", prompt(8), 6)
    bench.transferred("b", prompt(5, 300), 3)
    first, second = ahead_of(bench)
    assert first.token_ids[0] >= 0 and not first.ahead
    assert second.ahead and second.token_ids == [-1, -2] and second.starts == [9, 6]
    bench.finish(first)
    third = bench.schedule()
    assert third is not None and third.token_ids == [-1], "b's third token is on its way and the last"
    assert [finish for _, _, finish in bench.finish(second)] == [None, "length"]
    bench.finish(third)
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_story_of_an_answer_that_had_ended() -> None:
    """1 an end token comes back  2 its row in the next batch was for nothing  3 its blocks stay until that is back."""
    bench = Bench(max_inflight=2, caching=False)
    ids = prompt(8)
    wanted = expected(ids, 9)
    seq = bench.scheduler.add(request("a", ids, 9, end_ids=(wanted[2],)), attempt(), b"", bench.now)
    bench.wanted[seq.key], bench.answers[seq.key] = wanted[:3], []
    bench.step()
    first, second = ahead_of(bench)
    bench.finish(first)
    third = bench.schedule()
    assert third is not None and third.token_ids == [-1]
    held = bench.core.pool.held
    [(_, _, finish)] = bench.finish(second)
    assert finish == "stop" and seq.over and bench.core.pool.held == held > 0
    assert bench.finish(third) == [], "never shown"
    bench.check_exact_and_empty()


def test_story_of_rows_that_need_their_token_here() -> None:
    """Penalties and grammars are the host's: such rows wait until their token is seen. Log-probabilities need not."""
    bench = Bench(max_inflight=2)
    asked: list[dict[str, Any]] = [
        {"grammar": Grammar("regex", "a")},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1.0},
    ]
    for number, changes in enumerate(asked):
        ids = prompt(6, 100 * number)
        made = request(f"r{number}", ids, 5)
        made = replace(made, sampling=replace(made.sampling, **changes))
        bench._expect(bench.scheduler.add(made, attempt(), b"", bench.now), ids, 5)
    made = request("free", ids := prompt(7, 900), 6)
    made = replace(made, sampling=replace(made.sampling, logprobs=1))
    free = bench._expect(bench.scheduler.add(made, attempt(), b"", bench.now), ids, 6)
    while bench.scheduler.held.num_waiting or bench.scheduler.held.prefilling:
        bench.step()
    first, second = ahead_of(bench)
    assert len(first.rows) == 5 and [seq.key for seq in second.rows] == [free]
    bench.finish(first)
    third = bench.schedule()
    assert third is not None and len(third.rows) == 5 and sum(token < 0 for token in third.token_ids) == 1
    bench.finish(second)
    bench.finish(third)
    bench.to_the_end()
    bench.check_exact_and_empty()


def test_story_of_no_block_for_a_second_batch() -> None:
    """1 blocks run out while a batch is out  2 nobody is put out under it: there is no second one  3 it comes back, and
    the last by order is preempted as always."""
    bench = Bench(7, max_inflight=2, caching=False)
    bench.add("a", prompt(10), 14)
    bench.add("b", prompt(10, 300), 14)
    preempted = 0
    for _ in range(200):
        if not len(bench.scheduler.held):
            break
        out = [batch for batch in (bench.schedule(), bench.schedule()) if batch is not None]
        for batch in out:
            assert all(seq.life.phase is not Phase.PREEMPTED for seq in batch.rows)
            bench.finish(batch)
        preempted += len(out) == 1
    assert bench.scheduler.giving_way.preemptions > 0 and preempted > 0
    bench.check_exact_and_empty()


@pytest.mark.parametrize("num_blocks", [12, 16, 64])
def test_two_batches_out_say_what_one_says(num_blocks: int) -> None:
    chance = random.Random(num_blocks)
    work = [(prompt(chance.randrange(1, 30), 100 * n), chance.randrange(1, 16)) for n in range(20)]
    said = []
    for max_inflight in (1, 2):
        bench = Bench(num_blocks, max_num_seqs=5, max_inflight=max_inflight)
        for number, (ids, count) in enumerate(work):
            bench.add(f"r{number}", ids, count, priority=number % 3)
        out: list[Batch] = []
        most = 0
        while len(bench.scheduler.held) or out:
            while len(out) < max_inflight and (batch := bench.schedule()) is not None:
                out.append(batch)
            most = max(most, len(out))
            bench.finish(out.pop(0))
        assert most == max_inflight
        bench.check_exact_and_empty()
        said.append(bench.answers)
    assert said[0] == said[1]
