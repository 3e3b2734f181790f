"""Prefill scheduling told as numbered stories; each ends with an empty scheduler and a whole pool."""

from __future__ import annotations

import pytest

from common.lifecycle import Phase
from common.request import Key
from prefill_node.scheduler import MAX_PASSES, Outcome, PrefillScheduler
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
    """A scheduler, its core and a virtual model."""

    def __init__(self, num_blocks: int = 64, *, max_num_seqs: int = 8, caching: bool = True) -> None:
        self.core = make_core(num_blocks, max_num_seqs=max_num_seqs, caching=caching)
        self.scheduler = PrefillScheduler(self.core)
        self.model = model_for(self.core)
        self.now = 0.0
        self.counts: list[list[int]] = []  # tokens per row, per step
        self.prompts: dict[Key, list[int]] = {}

    def add(self, name: str, ids: list[int], *, priority: int = 0, max_tokens: int = 5) -> Key:
        wanted = request(name, ids, max_tokens, priority=priority)
        seq = self.scheduler.add(wanted, attempt(), b"", self.now)
        self.prompts[seq.key] = ids
        return seq.key

    def step(self) -> list[Outcome]:
        """One whole step; nothing when there is nothing to run."""
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return []
        self.counts.append(list(batch.counts))
        return self.scheduler.finish(batch, self.model.run(batch), self.now)

    def until_computed(self, limit: int = 200) -> list[Outcome]:
        """Steps until no prompt waits or computes; the outcomes with a token."""
        done: list[Outcome] = []
        for _ in range(limit):
            if not self.scheduler.num_waiting and not self.scheduler.num_running:
                return done
            done += [outcome for outcome in self.step() if outcome.token is not None]
        raise AssertionError("does not come to an end")

    def deliver(self, key: Key) -> None:
        assert self.scheduler.end(key, Phase.FINISHED, self.now) is not None

    def deliver_all(self) -> None:
        for seq in self.scheduler.sequences():
            self.deliver(seq.key)

    def check_empty(self) -> None:
        assert len(self.scheduler) == 0 and self.scheduler.queued_tokens == 0
        check_whole(self.core)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "length",
    [
        1,
        2,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        2 * BLOCK,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        2 * CHUNK,
        2 * CHUNK + 1,
        100,
    ],
)
def test_chunk_boundaries(length: int, caching: bool) -> None:
    """BR-061, BR-071: chunks add up to the prompt, one token comes out, blocks are as many as the prompt needs."""
    bench = Bench(caching=caching)
    key = bench.add("a", prompt(length))
    (outcome,) = bench.until_computed()
    full, rest = divmod(length, CHUNK)
    assert bench.counts == [[CHUNK]] * full + ([[rest]] if rest else [])
    assert [outcome.token] == expected(prompt(length), 1)
    assert bench.core.pool.held == -(-length // BLOCK)
    bench.deliver(key)
    assert bench.core.pool.cached == (length // BLOCK if caching else 0)
    bench.check_empty()


def test_story_of_packed_prompts() -> None:
    """1 three prompts share steps  2 a row that ends its prompt samples, others yield nothing (BR-059)."""
    bench = Bench()
    keys = [bench.add(name, prompt(length, 50)) for name, length in (("a", 6), ("b", 20), ("c", 3))]
    first = bench.step()
    assert bench.counts[0] == [6, 7, 3], "the long one leaves the last room for it"
    assert [(o.seq.key, o.token is None) for o in first] == list(zip(keys, (False, True, False), strict=True))
    second = bench.step()
    assert bench.counts[1] == [13]
    assert [o.token for o in second] == expected(prompt(20, 50), 1)
    for key in keys:
        bench.deliver(key)
    bench.check_empty()


def test_story_of_a_prompt_that_hits_its_own_blocks() -> None:
    """BR-062: block-aligned and wholly cached: the last block is computed anew, the token is the same."""
    for blocks in range(1, 5):
        bench = Bench()
        ids = prompt(blocks * BLOCK)
        tokens = []
        for name in ("first", "second", "third"):
            key = bench.add(name, ids)
            (outcome,) = bench.until_computed()
            tokens.append(outcome.token)
            assert outcome.seq.cached_tokens == (0 if name == "first" else (blocks - 1) * BLOCK)
            bench.deliver(key)
        assert tokens == expected(ids, 1) * 3
        bench.check_empty()


def test_a_prompt_shares_blocks_with_one_that_still_runs() -> None:
    bench = Bench()
    first = bench.add("a", prompt(20))
    bench.until_computed()
    second = bench.add("b", [*prompt(16), 1, 2])
    bench.until_computed()
    assert bench.core.pool.held == 5 + 1
    bench.deliver(first)
    assert bench.core.pool.held == 5, "the shared four are still the second's"
    bench.deliver(second)
    bench.check_empty()


def test_BR_044_story_of_reservation() -> None:
    """1 the pool fits one long prompt  2 the second waits whole, no block of it is taken (BR-044, BR-050)
    3 computed is not delivered: it waits still  4 delivered: it runs."""
    bench = Bench(num_blocks=10)
    first, second = bench.add("a", prompt(36)), bench.add("b", prompt(36, 500))
    bench.step()
    assert bench.core.pool.held == 9 and bench.scheduler.num_waiting == 1
    while bench.scheduler.num_running:
        bench.step()
    assert bench.step() == [] and bench.scheduler.num_waiting == 1
    bench.deliver(first)
    bench.until_computed()
    bench.deliver(second)
    bench.check_empty()


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_BR_050_two_half_cached_prompts_that_do_not_fit_together(order: tuple[str, str]) -> None:
    """BR-050: prefixes of a quarter and a third of the pool, 0.8 and 0.6 of it in all. Neither waits for the other
    with blocks in its hands."""
    bench = Bench(num_blocks=20)
    prompts = {"a": prompt(64), "b": prompt(48, 1000)}
    for name, length in (("a", 20), ("b", 28)):
        key = bench.add(f"warm-{name}", prompts[name][:length])
        bench.until_computed()
        bench.deliver(key)
    keys = [bench.add(name, prompts[name]) for name in order]
    for _ in range(2):
        bench.step()
        while bench.scheduler.num_running:
            bench.step()
        ready = [s.key for s in bench.scheduler.sequences() if s.life.phase is Phase.KV_READY]
        assert len(ready) == 1
        bench.deliver(ready[0])
    assert {key[0] for key in keys} == set(order)
    bench.check_empty()


def test_BR_068_small_prompts_pass_a_large_one_but_not_for_ever() -> None:
    """A long one that does not fit lets MAX_PASSES others by, then it is next."""
    bench = Bench(num_blocks=16, max_num_seqs=4)
    held = bench.add("held", prompt(40, 9000))
    bench.until_computed()
    bench.add("large", prompt(30, 5000))
    passed = 0
    for number in range(MAX_PASSES + 20):
        key = bench.add(f"s{number}", prompt(3, number))
        bench.step()
        if bench.scheduler.get(key) in bench.scheduler._waiting:
            break
        passed += 1
        bench.deliver(key)
    assert passed == MAX_PASSES
    bench.deliver(held)
    bench.step()
    phase = {str(seq.key[0]): seq.life.phase for seq in bench.scheduler.sequences()}
    assert phase["large"] is Phase.PREFILLING
    bench.until_computed()
    bench.deliver_all()
    bench.check_empty()


def test_order_is_class_then_arrival() -> None:
    bench = Bench()
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        bench.add(name, prompt(CHUNK, 7), priority=priority)
    done = [outcome.seq.key[0] for outcome in bench.until_computed()]
    assert done == ["urgent", "first", "second", "late"]
    bench.deliver_all()
    bench.check_empty()


def test_slots_are_for_prompts_that_compute() -> None:
    """Computed ones wait for their delivery without one: a full decode pool must not stop prefill by slots."""
    bench = Bench(max_num_seqs=1)
    keys = [bench.add(f"r{index}", prompt(5, 10 * index)) for index in range(4)]
    bench.until_computed()
    assert len(bench.scheduler) == 4 and bench.core.free_slots == 1
    for key in keys:
        bench.deliver(key)
    bench.check_empty()


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
@pytest.mark.parametrize("out", [False, True])
def test_BR_006_BR_024_aborted_before_during_and_after_each_chunk(chunk: int, out: bool) -> None:
    """A prompt of four chunks; `out` means that the step is running. The late result comes to
    nothing, and the same prompt afterwards is right."""
    bench = Bench()
    key = bench.add("a", prompt(64))
    for _ in range(chunk):
        bench.step()
    if out:
        batch = bench.scheduler.schedule(9.0)
        assert batch is not None
        held = bench.core.pool.held
        assert bench.scheduler.end(key, Phase.ABORTED, 9.0) is not None
        assert bench.core.pool.held == held, "the step may still write there"
        assert bench.scheduler.finish(batch, bench.model.run(batch), 9.5) == []
    else:
        bench.scheduler.end(key, Phase.ABORTED, 9.0)
    assert bench.scheduler.end(key, Phase.ABORTED, 9.9) is None, "idempotent"
    bench.check_empty()
    assert bench.core.pool.cached == chunk * CHUNK // BLOCK, "only what was computed"
    again = bench.add("b", prompt(64))
    (outcome,) = bench.until_computed()
    assert [outcome.token] == expected(prompt(64), 1)
    bench.deliver(again)
    bench.check_empty()


def test_abort_leaves_the_others_of_its_step_alone() -> None:
    """BR-048."""
    bench = Bench()
    gone, stays = bench.add("gone", prompt(6)), bench.add("stays", prompt(8, 60))
    batch = bench.scheduler.schedule(1.0)
    assert batch is not None and batch.counts == [6, 8]
    bench.scheduler.end(gone, Phase.ABORTED, 1.0)
    (outcome,) = bench.scheduler.finish(batch, bench.model.run(batch), 2.0)
    assert (outcome.seq.key, [outcome.token]) == (stays, expected(prompt(8, 60), 1))
    bench.deliver(stays)
    bench.check_empty()


@pytest.mark.parametrize("max_tokens, finish", [(1, "length"), (2, None)])
def test_an_answer_of_one_token_ends_here(max_tokens: int, finish: str | None) -> None:
    bench = Bench()
    key = bench.add("a", prompt(5), max_tokens=max_tokens)
    (outcome,) = bench.until_computed()
    assert outcome.finish == finish
    bench.deliver(key)
    bench.check_empty()
