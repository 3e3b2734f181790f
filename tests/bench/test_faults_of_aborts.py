"""Blocks and slots around aborts: group A of the faults that users have met, by their numbers, in virtual time.

After every story the pools are whole and empty: nothing waits for a limit to run out.
"""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual_cluster import FRONT
from bench.virtual_model import continuation
from bench.virtual_worker import Shape
from common.messages import Abort, Block, Cancel, Delivered, Ended, Handover, Message, Offer, Tokens
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

AT_ONCE_S = 0.02
"""Some messages to and fro, and the step that is out."""
LONG = drawn("long", 640)  # forty blocks of 16, three chunks


# ---------------------------------------------------------------- transfers under way


@pytest.mark.parametrize("abort_is_lost", [False, True])
def test_BR_001_the_client_leaves_and_then_the_prefill_worker_dies_mid_transfer(abort_is_lost: bool) -> None:
    """As often as would fill the decode worker's pool: it never waits for a notice that cannot come any more."""
    cluster = StoryCluster(decode_shape=Shape(num_blocks=90))
    for number in range(3):
        cluster.ask(f"r{number}", LONG)
        cluster.fate = lambda message: 0.05 if isinstance(message, Block) else 0.0
        cluster.until(lambda: cluster.counted("kv_transfer_bytes_total") > 0 and bool(cluster.held()))
        assert cluster.phase_at("decode-0", f"r{number}") == "kv_ready"
        cluster.fate = lambda message: None if abort_is_lost and isinstance(message, (Abort, Cancel)) else 0.0
        cluster.leave(RequestId(f"r{number}"))
        cluster.kill("prefill-0")
        cluster.go(0.6 if abort_is_lost else AT_ONCE_S)  # the next heartbeat tells
        assert "decode-0" not in cluster.held()
        cluster.fate = lambda message: 0.0
        cluster.restart("prefill-0")
        cluster.go(1.0)
        cluster.decode_node().records.counters.values.pop('kv_transfer_bytes_total{channel="tcp"}')
    answer = cluster.ask("after", LONG)
    cluster.until_over(answer)
    check_exact(answer, LONG)
    cluster.settle()


def test_BR_002_clients_leave_in_the_instant_in_which_their_prefill_ends() -> None:
    """Fifty, each a little earlier or later than its first token: none is left as "waiting to be fetched"."""
    cluster = StoryCluster()
    random = Random(2)
    seen_phases = set()
    for number in range(50):
        name, prompt = f"r{number}", drawn(f"r{number}", 100)
        cluster.ask(name, prompt, 30)
        cluster.until(lambda n=name: cluster.phase_at("prefill-0", n) == "prefilling")  # type: ignore[misc]
        cluster.go(random.uniform(0.018, 0.030))
        seen_phases.add(cluster.phase_at("prefill-0", name))
        cluster.leave(RequestId(name))
        cluster.go(AT_ONCE_S * 2)
        assert cluster.held() == {}, f"{name} left in {seen_phases}"
    assert seen_phases == {"prefilling", "kv_ready", None}, "before, in and after that instant"
    cluster.settle()


def test_BR_003_the_client_leaves_before_the_decode_worker_has_heard_of_the_request() -> None:
    """Its prompt is computed and the offer is two seconds late: the prefill worker is told, and frees at once; the late
    offer finds nobody who stands by it."""
    cluster = StoryCluster()
    cluster.fate = lambda message: 2.0 if isinstance(message, Offer) else 0.0
    cluster.ask("r", LONG)
    cluster.until(lambda: cluster.phase_at("prefill-0", "r") == "kv_ready")
    assert "decode-0" not in cluster.held()
    cluster.leave(RequestId("r"))
    cluster.go(AT_ONCE_S)
    assert cluster.held() == {}
    cluster.go(2.0)
    assert cluster.saw(Offer) >= 1 and cluster.held() == {}
    cluster.settle()


STATIONS = ["reserved", "half there", "delivered", "decoding", "preempted", "queued", "prefilling"]


def brought_to(station: str) -> StoryCluster:
    """A request "r" that stands at this station of its decode worker."""
    local = station in ("queued", "prefilling")
    shape = Shape(num_blocks=44, max_num_seqs=2, max_num_batched_tokens=64)
    cluster = StoryCluster(0 if local else 1, decode_shape=shape)
    if station in ("queued", "preempted", "delivered"):
        cluster.ask("other", drawn("other", 330 if local or station == "preempted" else 20), 300)
        cluster.until(lambda: cluster.phase_at("decode-0", "other") == "decoding")
    if station == "reserved":
        cluster.fate = lambda message: None if isinstance(message, Block) else 0.0
    elif station == "half there":
        cluster.fate = lambda message: None if isinstance(message, Block) and message.index % 2 else 0.0
    cluster.ask("r", drawn("r", 300), 300)
    seen_as = {"reserved": "kv_ready", "half there": "kv_ready", "delivered": "decode_ready"}
    wanted = seen_as.get(station, station)
    cluster.until(lambda: cluster.phase_at("decode-0", "r") == wanted)
    if station in ("reserved", "half there"):
        cluster.go(0.3)
        assert (cluster.counted("kv_transfer_bytes_total") > 0) == (station == "half there")
    return cluster


@pytest.mark.parametrize("station", STATIONS)
def test_BR_004_every_queue_of_the_decode_worker_has_a_way_out(station: str) -> None:
    cluster = brought_to(station)
    assert cluster.phase_at("decode-0", "r") is not None
    cluster.leave(RequestId("r"))
    cluster.go(AT_ONCE_S)
    assert cluster.phase_at("decode-0", "r") is None
    if RequestId("other") in cluster.answers:
        cluster.leave(RequestId("other"))
        cluster.go(AT_ONCE_S)
    assert cluster.held() == {}
    cluster.settle()


@pytest.mark.parametrize("chunk", [2, 4])
def test_BR_006_the_client_leaves_while_a_chunk_is_being_computed(chunk: int) -> None:
    """The second of four, and the last: the late result comes to nothing, is said to nobody, and nothing of it can be
    found in a cache."""
    cluster = StoryCluster(prefill_shape=Shape(max_num_batched_tokens=64))
    cluster.ask("r", drawn("r", 256))
    worker = cluster.workers[WorkerId("prefill-0")]
    steps = worker.node.records.counters

    def begun() -> int:
        return int(steps.values.get("computed_tokens_total", 0) // 64) + cluster.is_computing("prefill-0")

    cluster.until(lambda: begun() == chunk)
    before = cluster.pool("prefill-0").cached
    cluster.seen.clear()
    cluster.leave(RequestId("r"))
    cluster.go(0.002)
    assert cluster.is_computing("prefill-0") and cluster.held() == {"prefill-0": 16}, "its step is out"
    cluster.go(AT_ONCE_S * 2)
    assert cluster.held() == {} and cluster.saw(Tokens) == cluster.saw(Handover) == 0
    assert len([m for m in cluster.seen if isinstance(m, Ended)]) == 2, "one from each worker"
    assert cluster.pool("prefill-0").cached - before <= 4 * (chunk - 1), "nothing uncertain is published"
    cluster.settle()


def test_BR_007_an_abort_between_the_start_of_a_load_and_its_end() -> None:
    """Every block takes half a second. They come to nothing, one by one, and what they leave in the sender's account of
    bytes under way is cleared."""
    cluster = StoryCluster()
    cluster.fate = lambda message: 0.5 if isinstance(message, Block) else 0.0
    cluster.ask("r", LONG)
    cluster.until(lambda: cluster.phase_at("prefill-0", "r") == "kv_ready")
    assert cluster.phase_at("decode-0", "r") == "kv_ready"
    cluster.leave(RequestId("r"))
    cluster.go(AT_ONCE_S)
    assert cluster.held() == {}
    late = cluster.counted("late_messages_total")
    cluster.go(1.0)
    assert cluster.counted("late_messages_total") - late >= 8, "a window of blocks was under way"
    cluster.fate = lambda message: 0.0
    answer = cluster.ask("after", LONG)
    cluster.until_over(answer)
    check_exact(answer, LONG)
    cluster.settle()


def test_BR_008_bursts_of_clients_that_leave_mid_transfer_then_a_probe() -> None:
    cluster = StoryCluster(prefill_shape=Shape(num_blocks=90), decode_shape=Shape(num_blocks=90))
    probe = drawn("probe", 60)

    def probed_s(name: str) -> float:
        answer = cluster.ask(name, probe, 4)
        cluster.until_over(answer)
        check_exact(answer, probe, 4)
        return answer.stamps[-1] - answer.submitted

    probed_s("warms the caches")
    alone_s = probed_s("alone")
    for burst in range(5):
        names = [f"b{burst}-{number}" for number in range(4)]
        for name in names:
            cluster.ask(name, drawn(name, 640))
        cluster.fate = lambda message: 0.1 if isinstance(message, Block) else 0.0
        cluster.until(lambda n=names: any(cluster.phase_at("decode-0", name) for name in n))  # type: ignore[misc]
        cluster.go(0.15)
        for name in names:
            cluster.leave(RequestId(name))
        cluster.fate = lambda message: 0.0
    cluster.go(AT_ONCE_S * 4)
    assert probed_s("probe") < 2 * alone_s
    cluster.settle()


def test_BR_010_both_ends_name_a_transfer_alike() -> None:
    """Where nothing is lost and nothing overtakes, no notice is about anything unknown."""
    cluster = StoryCluster(2, 2, delay_s=(0.0003, 0.0003))
    prompts = {f"r{number}": drawn(f"r{number}", 20 + 17 * number) for number in range(20)}
    answers = [cluster.ask(name, prompt) for name, prompt in prompts.items()]
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, prompts.values(), strict=True):
        check_exact(answer, prompt)
    cluster.settle()
    assert cluster.saw(Delivered) == 20
    assert cluster.counted("late_messages_total") == cluster.front.late_rows == 0


def test_BR_011_one_request_on_an_idle_cluster_leaves_nothing_behind() -> None:
    """No other request comes that would wake anybody: also where the last word about it is lost."""
    for lose in (None, Delivered):
        cluster = StoryCluster()
        lost: list[Message] = []

        def fate(
            message: Message, lost: list[Message] = lost, lose: type[Message] | None = lose
        ) -> float | None:
            if lose is not None and isinstance(message, lose) and not lost:
                lost.append(message)
                return None
            return 0.0

        cluster.fate = fate
        answer = cluster.ask("r", LONG)
        cluster.until_over(answer)
        cluster.go(1.1 if lose else 0.1)
        assert cluster.held() == {} and len(lost) == (lose is not None)
        cluster.check_idle()


@pytest.mark.parametrize("apart", [True, False])
def test_BR_012_a_client_that_asked_for_four_answers_leaves(apart: bool) -> None:
    """Four choices of one prompt, or four prompts: all end within a step, in whatever phase each is."""
    cluster = StoryCluster(prefill_shape=Shape(max_num_batched_tokens=64))
    leader = "" if apart else "c0"
    requests = [
        Request(
            RequestId(f"c{child}"),
            pack_ids(drawn(f"c{child if apart else 0}", 100)),
            SamplingParams(4096 - 200, child=0 if apart else child),
            FRONT,
            leader=leader,
        )
        for child in range(4)
    ]
    answers = cluster.submit_group(requests)
    cluster.until(lambda: any(answer.ids for answer in answers))
    cluster.leave(RequestId("c0"))
    cluster.go(AT_ONCE_S * 2)
    assert cluster.held() == {} and cluster.cluster.num_running() == cluster.cluster.num_waiting() == 0
    assert len(cluster.cluster.tracker) == 0 and [answer.end for answer in answers] == ["left"] * 4
    cluster.settle()


def test_BR_013_the_same_block_aligned_prompt_again_and_again() -> None:
    """Every block of it is there already: a transfer of nothing is completed like another."""
    cluster = StoryCluster()
    prompt = drawn("aligned", 64)
    for number in range(30):
        answer = cluster.ask(f"r{number}", prompt, 4)
        cluster.until_over(answer)
        check_exact(answer, prompt, 4)
        cluster.go(0.1)
        assert cluster.held() == {}
    assert cluster.counted("kv_transfer_bytes_total") == 4 * 1000, "once"
    cluster.settle()


@pytest.mark.parametrize("caching", [True, False])
def test_BR_014_the_books_agree_after_every_request(caching: bool) -> None:
    """Free, held and cached are all there is, holders are never fewer than none: in the middle of it too."""
    shape = Shape(num_blocks=24, prefix_caching=caching)
    cluster = StoryCluster(decode_shape=shape, prefill_shape=shape)
    for number in range(20):
        answer = cluster.ask(f"r{number}", drawn(f"r{number % 3}", 7 + 5 * (number % 4)), 64)
        while answer.end is None:
            cluster.go(0.01)
            cluster.held()
        cluster.go(0.05)
        assert cluster.held() == {}
        for worker in cluster.workers.values():
            assert worker.pool.free + worker.pool.cached == worker.pool.total
    cluster.settle()


def test_BR_015_failed_transfers_cost_no_slots() -> None:
    """One transfer in ten fails, of ten times as many as there are slots; then as many run at once as ever."""
    slots = 6
    cluster = StoryCluster(decode_shape=Shape(max_num_seqs=slots))
    failing = {RequestId(f"r{number}") for number in range(0, slots * 10, 10)}

    def fate(message: Message) -> float | None:
        spoilt = isinstance(message, Handover) and message.id in failing
        return None if spoilt and cluster.counted("requests_migrated_total") < len(failing) else 0.0

    cluster.fate = fate
    for worker in cluster.workers.values():
        if hasattr(worker.transfers, "_timeout_s"):
            worker.transfers._timeout_s /= 20  # a link that is down is not to be waited for here
    for number in range(slots * 10):
        cluster.ask(f"r{number}", drawn(f"r{number}", 40), 3)
        cluster.go(0.03)
    cluster.until_over(*cluster.answers.values())
    assert {answer.end for answer in cluster.answers.values()} == {"length"}
    assert cluster.counted("kv_transfer_failures_total") >= len(failing)
    cluster.fate = lambda message: 0.0
    cluster.settle()
    answers = [cluster.ask(f"all-{number}", drawn(f"all-{number}", 40), 60) for number in range(slots)]
    most = 0
    while any(answer.end is None for answer in answers):
        cluster.go(0.02)
        most = max(most, cluster.decode_node().heartbeat(0.0).load.running)
    assert most == slots
    cluster.settle()


def test_BR_017_prompts_that_nobody_wants_any_more_are_in_nobodys_way() -> None:
    """A prefill worker that computes one prompt at a time: four long ones are left before their first token, the short
    one behind them starts as soon as the step that is out is over."""
    shape = Shape(max_num_seqs=1, max_num_batched_tokens=64)
    cluster = StoryCluster(prefill_shape=shape)
    for number in range(4):
        cluster.ask(f"long-{number}", drawn(f"long-{number}", 600))
    cluster.until(lambda: cluster.phase_at("prefill-0", "long-0") == "prefilling")
    cluster.go(0.03)
    assert not any(answer.ids for answer in cluster.answers.values())
    for number in range(4):
        cluster.leave(RequestId(f"long-{number}"))
    short = cluster.ask("short", drawn("short", 10), 4)
    cluster.until_over(short)
    assert short.ids == continuation(drawn("short", 10), 4)
    assert short.stamps[0] - short.submitted < AT_ONCE_S * 2
    cluster.settle()
