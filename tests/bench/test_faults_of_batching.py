"""Batches, chunks and a full pool: group D of the faults that users have met, in virtual time.

What it takes a model or a process to see is in `tests/exactness/test_paths.py` and `tests/common/`; order and the long
prompt among short ones are with the schedulers.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from bench.virtual_cluster import FRONT, Answer
from bench.virtual_worker import Shape, VirtualWorker
from common.batching import Batch
from common.lifecycle import Phase
from common.messages import Block, Handover
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids
from decode_node.forming import STATIC_LIMIT_S
from decode_node.preemption import MAX_VICTIM
from prefill_node.worker import PrefillWorker
from tests.bench.story_cluster import SMALL_STEPS, StoryCluster, check_exact, drawn

BLOCK = 16
SMALL = Shape(num_blocks=24, max_num_seqs=8)
"""A third of what eight long answers want."""


def batches_of(cluster: StoryCluster, name: str = "decode-0") -> list[Batch]:
    """Those that the worker is handed from now on."""
    seen: list[Batch] = []
    worker: VirtualWorker = cluster.workers[WorkerId(name)]
    usual = worker.node.schedule

    def schedule(now: float) -> Batch | None:
        batch = usual(now)
        if batch is not None:
            seen.append(batch)
        return batch

    worker.node.schedule = schedule  # type: ignore[method-assign]
    return seen


def ask_many(
    cluster: StoryCluster, count: int, length: int, max_tokens: int
) -> list[tuple[Answer, list[int]]]:
    prompts = [drawn(f"m{number}", length + number % 5) for number in range(count)]
    return [(cluster.ask(f"m{number}", prompt, max_tokens), prompt) for number, prompt in enumerate(prompts)]


def check_all(cluster: StoryCluster, asked: list[tuple[Answer, list[int]]], max_tokens: int) -> None:
    cluster.until_over(*(answer for answer, _ in asked))
    for answer, prompt in asked:
        check_exact(answer, prompt, max_tokens)


# ---------------------------------------------------------------- a pool that is full


@pytest.mark.parametrize("prefill", [1, 0])
@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_BR_053_what_never_fits_is_refused_at_once_and_blocks_nobody(prefill: int, small: str) -> None:
    """A thousand tokens, for a pool of 800; then five."""
    tight = Shape(num_blocks=50)
    in_prefill = prefill and small == "prefill"
    cluster = StoryCluster(
        prefill, 1, prefill_shape=tight if in_prefill else None, decode_shape=None if in_prefill else tight
    )
    large = cluster.ask("large", drawn("large", 1000))
    assert large.end == "BadRequest" and "800" in large.reason
    answer_too = cluster.ask("long answer", drawn("x", 700), 101)
    assert answer_too.end == "BadRequest"
    short = cluster.ask("short", drawn("short", 5))
    cluster.until_over(short)
    check_exact(short, drawn("short", 5))
    fits = cluster.ask("fits", drawn("y", 700), 100)
    cluster.until_over(fits)
    check_exact(fits, drawn("y", 700), 100)
    cluster.settle()


@pytest.mark.parametrize("prefill", [1, 0])
@pytest.mark.parametrize("max_inflight", [1, 2])
def test_BR_055_BR_057_put_out_and_taken_up_again_it_is_the_same_answer(
    prefill: int, max_inflight: int
) -> None:
    """With two batches out a token of a victim's is on its way when its blocks are wanted. Exactly as many as were
    asked for, and each of them what a large pool gives."""
    shape = Shape(num_blocks=24, max_num_seqs=8, max_inflight=max_inflight)
    cluster = StoryCluster(prefill, 1, decode_shape=shape)
    check_all(cluster, ask_many(cluster, 24, 20, 100), 100)
    assert cluster.counted("num_preemptions_total") > 0
    cluster.settle()


def test_BR_056_what_is_handed_over_is_always_the_whole_prompt() -> None:
    """The prefill pool holds two prompts, of which some are given up while their last chunk is computed."""
    cluster = StoryCluster(prefill_shape=Shape(num_blocks=30, max_num_seqs=4))
    random = Random(3)
    lengths: dict[RequestId, int] = {}
    for number in range(60):
        name, length = f"r{number}", random.randrange(1, 300)
        lengths[RequestId(name)] = length
        cluster.ask(name, drawn(name, length), 3)
        cluster.go(random.uniform(0, 0.06))
        if number % 4 == 0:
            cluster.leave(RequestId(name))
    cluster.until_over(*cluster.answers.values())
    handed = [message for message in cluster.seen if isinstance(message, Handover)]
    assert len(handed) >= 45
    assert all(message.num_blocks == -(-lengths[message.id] // BLOCK) for message in handed)
    cluster.settle()


def test_BR_065_the_victim_is_not_in_the_step_that_puts_it_out() -> None:
    """The pool is full of the lowest class, in the middle of their answers, when the highest comes."""
    cluster = StoryCluster(0, 1, decode_shape=SMALL)
    batches = batches_of(cluster)
    low = [
        (
            cluster.submit(
                Request(RequestId(f"l{n}"), pack_ids(prompt), SamplingParams(120), FRONT, priority=5)
            ),
            prompt,
        )
        for n, prompt in enumerate(drawn(f"l{n}", 20) for n in range(8))
    ]
    cluster.go(0.6)
    high = drawn("high", 60)
    first = cluster.submit(Request(RequestId("high"), pack_ids(high), SamplingParams(120), FRONT, priority=0))
    put_out = 0
    while any(answer.end is None for answer in (first, *(answer for answer, _ in low))):
        seen = len(batches)
        cluster.clock.step(cluster.now + 60)
        sequences = cluster.decode_node()._scheduler.held.sequences()
        gone = {id(seq) for seq in sequences if seq.life.phase is Phase.PREEMPTED}
        put_out += len(gone)
        assert all(id(seq) not in gone for batch in batches[seen:] for seq in batch.rows)
    assert put_out > 0 and cluster.counted("num_preemptions_total") > 0
    check_exact(first, high, 120)
    check_all(cluster, low, 120)
    cluster.settle()


def test_BR_066_at_a_little_more_than_fits_victims_are_few_and_no_row_is_skipped() -> None:
    """Arrivals at 110 % of what the worker does: nobody is put out again and again, and who decodes is in every
    batch."""
    cluster = StoryCluster(0, 1, decode_shape=SMALL)
    batches = batches_of(cluster)
    scheduler = cluster.decode_node()._scheduler
    worst = skipped = 0
    for number in range(60):
        cluster.ask(f"r{number}", drawn(f"r{number}", 20), 80)
        until = cluster.now + 0.1
        while cluster.now < until:
            decoding = {
                id(seq)
                for seq in scheduler.held.sequences()
                if seq.life.phase is Phase.DECODING and not seq.in_batch
            }
            seen = len(batches)
            if not cluster.clock.step(until):
                break
            rows = [{id(seq) for seq in batch.rows} for batch in batches[seen:]]
            still = {id(seq) for seq in scheduler.held.sequences() if seq.life.phase is Phase.DECODING}
            skipped += sum(bool((decoding & still) - of) for of in rows)
            worst = max(worst, *(seq.preemptions for seq in scheduler.held.sequences()), 0)
    cluster.until_over(*cluster.answers.values())
    assert cluster.counted("num_preemptions_total") > 0
    assert worst <= MAX_VICTIM and skipped == 0
    cluster.settle()


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("prefill", [1, 0])
def test_BR_059_rows_without_a_token_are_in_no_batch(prefill: int) -> None:
    """Fourteen short prompts and two very long ones at once: each gets what it gets alone."""
    cluster = StoryCluster(prefill, 1, decode_shape=Shape(512), prefill_shape=Shape(512))
    batches = batches_of(cluster, "prefill-0" if prefill else "decode-0")
    prompts = [drawn(f"r{n}", 3000 if n in (3, 9) else 20 + n) for n in range(16)]
    asked = [(cluster.ask(f"r{n}", prompt, 12), prompt) for n, prompt in enumerate(prompts)]
    check_all(cluster, asked, 12)
    assert all(count > 0 for batch in batches for count in batch.counts)
    assert all(len({id(seq) for seq in batch.rows}) == len(batch.rows) for batch in batches)
    assert max(len(batch.rows) for batch in batches) >= 5
    cluster.settle()


@pytest.mark.parametrize("prefill", [1, 0])
def test_BR_062_whole_blocks_that_are_all_cached_leave_one_token_to_compute(prefill: int) -> None:
    """Prompts of one to four whole blocks, twice; over the link nothing goes the second time."""
    cluster = StoryCluster(prefill, 1)
    for blocks in range(1, 5):
        prompt = drawn(f"b{blocks}", blocks * BLOCK)
        first = cluster.ask(f"first{blocks}", prompt)
        cluster.until_over(first)
        cluster.go(0.1)
        sent, hits = cluster.saw(Block), cluster.counted("prefix_cache_hits_total")
        again = cluster.ask(f"again{blocks}", prompt)
        cluster.until_over(again)
        cluster.go(0.1)
        assert first.ids == again.ids
        check_exact(again, prompt)
        assert cluster.saw(Block) == sent
        # Where the prompt is computed all but the last block is used; where it is taken over, all of it.
        whole = (blocks - 1) * BLOCK + (blocks * BLOCK if prefill else 0)
        assert cluster.counted("prefix_cache_hits_total") - hits == whole
    cluster.settle()


@pytest.mark.parametrize("caching", [False, True])
def test_BR_071_a_prompt_in_four_chunks_takes_its_blocks_once(caching: bool) -> None:
    """Many at a time, with the prefix cache off and on: what is held is what they are long, and all comes back."""
    shape = Shape(num_blocks=1000, max_num_seqs=16, prefix_caching=caching)
    cluster = StoryCluster(prefill_shape=shape, decode_shape=Shape(1000))
    asked = ask_many(cluster, 16, 1000, 3)
    worker = cluster.workers[WorkerId("prefill-0")]
    node = worker.node
    assert isinstance(node, PrefillWorker)
    most = 0
    while any(answer.end is None for answer, _ in asked):
        assert cluster.clock.step(cluster.now + 60)
        held = [len(seq.blocks) for seq in node._scheduler.sequences()]
        assert worker.pool.held == sum(held)
        assert all(blocks <= -(-1004 // BLOCK) for blocks in held)
        most = max(most, sum(held))
    assert most >= 2 * (1000 // BLOCK), "two at a time at least"
    check_all(cluster, asked, 3)
    cluster.go(1.0)
    assert worker.pool.held == 0 and (caching or worker.pool.free == worker.pool.total)
    cluster.settle()


# ---------------------------------------------------------------- waits


def test_BR_069_running_streams_go_on_beside_local_prefill_without_end() -> None:
    """No prefill worker is left, prompts of four chunks come all the time: a gap is a step with one chunk at most."""
    cluster = StoryCluster(0, 1, decode_shape=Shape(4000))
    streams = [cluster.ask(f"s{n}", drawn(f"s{n}", 20), 300) for n in range(4)]
    cluster.go(0.3)
    began = cluster.now
    for number in range(60):
        cluster.ask(f"p{number}", drawn(f"p{number}", 1000), 2)
        cluster.go(0.1)
    assert cluster.workers[WorkerId("decode-0")].node.heartbeat(0.0).load.queued_tokens >= 1000
    stamps = [[stamp for stamp in answer.stamps if stamp > began] for answer in streams]
    full_step_s = SMALL_STEPS.base_s + 32 * SMALL_STEPS.row_s + 256 * SMALL_STEPS.token_s
    assert all(len(line) > 5 / full_step_s for line in stamps)
    assert max(b - a for line in stamps for a, b in pairwise(line)) < full_step_s + 0.005
    cluster.until_over(*cluster.answers.values())
    cluster.settle()


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(None, 0.1), (0.5, 0.7), (0.0, STATIC_LIMIT_S + 0.2)])
def test_BR_070_after_a_burst_a_trickle_is_served(timeout_s: float | None, limit_s: float) -> None:
    """As many as ever run at once, then one a second: no delay is measured against what once was."""
    cluster = StoryCluster(0, 1, decode_shape=Shape(max_num_seqs=16, batch_timeout_s=timeout_s))
    burst = ask_many(cluster, 16, 20, 8)
    check_all(cluster, burst, 8)
    trickle = []
    for number in range(4):
        prompt = drawn(f"t{number}", 20)
        trickle.append((cluster.ask(f"t{number}", prompt), prompt))
        cluster.go(1.0)
    cluster.go(STATIC_LIMIT_S)
    assert all(answer.stamps[0] - answer.submitted < limit_s for answer, _ in trickle)
    check_all(cluster, trickle, 8)
    cluster.settle()


def test_BR_070_the_same_through_both_pools() -> None:
    cluster = StoryCluster(prefill_shape=Shape(max_num_seqs=16), decode_shape=Shape(max_num_seqs=16))
    check_all(cluster, ask_many(cluster, 40, 60, 8), 8)
    for number in range(4):
        one = cluster.ask(f"t{number}", drawn(f"t{number}", 20))
        cluster.go(1.0)
        assert one.end == "length" and one.stamps[0] - one.submitted < 0.1
    cluster.settle()
