"""Local prefill beside answers with an ITL target: the rule by itself, and a whole worker in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_worker import Shape, StepTime
from common.lifecycle import Phase
from common.promised import GUESTS_FOR_S
from common.request import Request, RequestId, SamplingParams, pack_ids
from common.sequence import Sequence
from common.step_times import Coefficients, StepShape, seconds_of
from decode_node.chunk_budget import CAUTION, MIN_CHUNK, PATIENCE, ChunkBudget
from decode_node.scheduler import DecodeScheduler
from tests.common.stepping import attempt, make_core, prompt, request

MODEL: Coefficients = (0.008, 0.0005, 1e-6, 0.0003)
MOST = 256


def seqs(count: int, itl_s: float | None = None, computed: int = 100) -> list[Sequence]:
    made = []
    for index in range(count):
        wanted = replace(request(f"r{index}", prompt(8)), itl_s=itl_s)
        seq = Sequence(wanted, attempt(), b"", index, Phase.QUEUED, 0.0)
        seq.num_computed = computed
        made.append(seq)
    return made


def step_s(decoding: list[Sequence], prefilling: list[Sequence], chunk: int) -> float:
    context = sum(seq.num_computed for seq in (*decoding, *prefilling))
    return seconds_of(MODEL, StepShape(len(decoding) + len(prefilling), context, chunk))


def test_the_first_step_of_one_that_waited_for_it_is_shorter_by_that() -> None:
    decoding, prefilling, (came,) = seqs(7, 0.06), seqs(1), seqs(1, 0.06)
    came.life.go(Phase.DECODE_READY, 0.0)
    came.life.move(Phase.DECODING, 0.03)
    rows = [*decoding, came]
    chunk = ChunkBudget(MOST).tokens(rows, prefilling, MODEL, joined=(came,), now=0.03)
    assert step_s(rows, prefilling, chunk) <= CAUTION * 0.03 < step_s(rows, prefilling, chunk + 1)
    assert ChunkBudget(MOST).tokens(rows, prefilling, MODEL, now=0.03) > 2 * chunk


def test_as_much_as_fits_under_the_tightest_target() -> None:
    decoding, prefilling = [*seqs(4, 0.2), *seqs(1, 0.04), *seqs(2)], seqs(2)
    budget = ChunkBudget(MOST).tokens(decoding, prefilling, MODEL)
    assert MIN_CHUNK < budget < MOST - len(decoding)
    assert step_s(decoding, prefilling, budget) <= CAUTION * 0.04 < step_s(decoding, prefilling, budget + 1)


@pytest.mark.parametrize("model", [None, MODEL])
def test_without_targets_or_without_a_fit_it_is_what_the_step_leaves(model: Coefficients | None) -> None:
    itl_s = None if model else 0.001
    assert ChunkBudget(MOST).tokens(seqs(7, itl_s), seqs(1), model) == MOST - 7
    assert ChunkBudget(8).tokens(seqs(7, itl_s), seqs(1), model) == MIN_CHUNK, "a full batch starves nobody"
    assert ChunkBudget(MOST).tokens([], seqs(1, 0.001), MODEL) == MOST, "only answers have gaps"


def test_those_that_are_about_to_join_count_and_higher_classes_that_came_of_late() -> None:
    """Whose transfer is accepted may become whole while the step runs: its first gap is what is left of that and one
    more."""
    budget, bare, prefilling = ChunkBudget(MOST), seqs(2), seqs(1)
    (joins,) = seqs(1, 0.04)
    tight = budget.tokens([*bare, *seqs(1, 0.04)], prefilling, MODEL)
    assert (
        budget.tokens(bare, prefilling, MODEL, joining=[joins]) in (tight, tight + 1, tight + 2)
        and tight < 100
    )
    assert budget.tokens(bare, prefilling, MODEL) == MOST - 2
    budget.arrives(joins, now=5.0)
    assert budget.tokens(bare, prefilling, MODEL, now=6.0) == MOST - 2, "it is of their class"
    for seq in prefilling:
        seq.lane = (1, "", "")
    assert budget.tokens(bare, prefilling, MODEL, now=6.0) in (tight, tight + 1, tight + 2)
    assert budget.tokens(bare, prefilling, MODEL, now=6.0 + GUESTS_FOR_S) == MOST - 2


def test_one_that_is_nearly_whole_waits_for_this_step_and_for_the_next() -> None:
    """Its gap was two of them: over the target by a third of one."""
    rows, prefilling, (joins,) = seqs(7, 0.06), seqs(1), seqs(1, 0.06)
    plain = ChunkBudget(MOST).tokens(rows, prefilling, MODEL, joining=[joins])
    chunk = ChunkBudget(MOST).tokens(rows, prefilling, MODEL, joining=[joins], soon=[joins])
    next_s = step_s([*rows, joins], prefilling, MIN_CHUNK)
    assert step_s(rows, prefilling, chunk) + next_s <= 0.06 < step_s(rows, prefilling, plain) + next_s
    tight = seqs(1, 1.9 * next_s)
    most = ChunkBudget(MOST).tokens(rows, prefilling, MODEL, joining=tight)
    assert ChunkBudget(MOST).tokens(rows, prefilling, MODEL, joining=tight, soon=tight) == most, (
        "no two steps fit in it, whatever is in them"
    )


def test_the_scheduler_tells_who_is_on_the_way() -> None:
    scheduler = DecodeScheduler(make_core(4000, chunk=MOST))
    scheduler.add(request("long", prompt(1000)), attempt(), b"", 0.0)
    joins = replace(request("joins", prompt(8)), itl_s=0.04)
    assert scheduler.reserve(joins, attempt(), b"", 0.0) is not None
    batch = scheduler.schedule(0.0, MODEL)
    assert batch is not None and MIN_CHUNK <= batch.num_tokens < 100
    nearly = DecodeScheduler(make_core(4000, chunk=MOST))
    nearly.add(request("long", prompt(1000)), attempt(), b"", 0.0)
    seq = nearly.reserve(joins, attempt(), b"", 0.0)
    assert seq is not None
    shorter = nearly.schedule(0.0, MODEL, [seq.key])
    assert shorter is not None and MIN_CHUNK <= shorter.num_tokens < batch.num_tokens


def test_a_transfer_whose_room_was_given_up_is_on_the_way_no_more() -> None:
    """The receiver hears of it after the step is decided, and that may be in a second try, where the first one raised:
    each later try raised for it too, and one request after the other was failed."""
    scheduler = DecodeScheduler(make_core(4000, chunk=MOST))
    scheduler.add(request("long", prompt(1000)), attempt(), b"", 0.0)
    seq = scheduler.reserve(request("joins", prompt(8)), attempt(), b"", 0.0)
    assert seq is not None
    scheduler.giving_way.to_those_who_run(0.0)
    assert scheduler.giving_way.revoked == [seq.key] and not scheduler.held.reserved
    batch = scheduler.schedule(0.0, MODEL, [seq.key])
    assert batch is not None and batch.num_tokens == MOST


def test_what_is_aimed_at_follows_what_steps_took() -> None:
    """A machine on which every tenth step takes half as long again as its fit says: few are late for all that, and
    when it is quiet again chunks are what they were."""
    budget, decoding, prefilling, late = ChunkBudget(MOST), seqs(4, 0.04), seqs(1), 0
    first = budget.tokens(decoding, prefilling, MODEL)
    for step in range(500):
        took_s = step_s(decoding, prefilling, budget.tokens(decoding, prefilling, MODEL))
        took_s *= 1.5 if step % 10 == 0 else 1.0
        late += took_s > 0.04
        budget.took(took_s)
    assert 0 < late <= 8 and budget.tokens(decoding, prefilling, MODEL) < 0.8 * first
    for _ in range(800):
        budget.took(0.03)
    assert budget.tokens(decoding, prefilling, MODEL) == first


def test_a_wide_target_gives_no_more_than_the_step_may_have() -> None:
    assert ChunkBudget(MOST).tokens(seqs(7, 10.0), seqs(1), MODEL) == MOST - 7
    free: Coefficients = (0.008, 0.0, 0.0, 0.0)
    assert ChunkBudget(MOST).tokens(seqs(7, 0.04), seqs(1), free) == MOST - 7


def test_the_least_chunk_is_in_every_step_that_keeps_its_target_with_it() -> None:
    decoding, prefilling = seqs(4, 1.0), seqs(1)
    bare = step_s(decoding, prefilling, MIN_CHUNK)
    for seq in decoding:
        seq.request = replace(seq.request, itl_s=bare * 1.01)  # beyond CAUTION, within the target
    budget = ChunkBudget(MOST)
    assert [budget.tokens(decoding, prefilling, MODEL) for _ in range(20)] == [MIN_CHUNK] * 20


def test_what_breaks_the_target_anyway_goes_on_every_few_steps() -> None:
    budget = ChunkBudget(MOST)
    given = [budget.tokens(seqs(4, 0.001), seqs(1), MODEL) for _ in range(5 * PATIENCE)]
    assert given == ([0] * (PATIENCE - 1) + [MIN_CHUNK]) * 5


# ---------------------------------------------------------------- a worker in virtual time

TIME = StepTime(0.008, 0.0005, 0.0003)
TARGET_S = 0.04
FULL_STEP_S = TIME.base_s + 7 * TIME.row_s + MOST * TIME.token_s


def chats_beside_long_prompts(itl_s: float | None) -> tuple[list[Answer], list[Answer]]:
    """Six that chat, and long prompts that come while they do."""
    cluster = VirtualCluster(
        seed=3, num_prefill=0, num_decode=1, decode_shape=Shape(4000), step_time=TIME, prefill_shape=None
    )
    cluster.run(until=1.0)

    def submit(name: str, tokens: int, answer: int, itl_s: float | None) -> Answer:
        first = 2000 * len(cluster.answers)
        ids = pack_ids(range(first, first + tokens))
        return cluster.submit(Request(RequestId(name), ids, SamplingParams(answer), FRONT, itl_s=itl_s))

    chats = [submit(f"chat{index}", 20, 400, itl_s) for index in range(6)]
    cluster.run(until=2.0)
    prompts = [submit(f"long{index}", 1500, 2, None) for index in range(4)]
    cluster.run(until=40.0)
    assert all(answer.end == "length" for answer in (*chats, *prompts))
    cluster.check_idle()
    return chats, prompts


def gaps_s(answers: list[Answer]) -> list[float]:
    """From when the long prompts come on, and the worker knows how long its steps take."""
    pairs = [pair for answer in answers for pair in pairwise(answer.stamps)]
    return [after - before for before, after in pairs if before > 2.0]


def test_gaps_stay_under_the_target_beside_long_prompts() -> None:
    chats, prompts = chats_beside_long_prompts(TARGET_S)
    assert max(gaps_s(chats)) <= TARGET_S
    most_s = max(answer.stamps[0] - answer.submitted for answer in prompts)
    assert most_s < 4, "and they get all that the target leaves"


def test_without_a_target_steps_are_as_full_as_ever() -> None:
    chats, _ = chats_beside_long_prompts(None)
    gaps = gaps_s(chats)
    assert max(gaps) == pytest.approx(FULL_STEP_S, abs=0.002)
    assert sum(gap > 2 * TARGET_S for gap in gaps) >= 6 * 20
