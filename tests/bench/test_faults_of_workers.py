"""Workers that die, hang, come back or cannot be reached: group C of the faults that users have met, in virtual time.

By their numbers. Those about sockets are in tests/transfer/test_links.py, those about processes in
tests/e2e/test_pools.py.
"""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual_cluster import Answer
from bench.virtual_worker import Shape
from common.messages import Accept, Block, Handover, Message, Offer
from common.request import RequestId, WorkerId
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

LONG = drawn("long", 640)
ONE_AT_A_TIME = Shape(max_num_seqs=1)


def ask_some(cluster: StoryCluster, count: int, max_tokens: int = 12) -> list[tuple[Answer, list[int], int]]:
    prompts = [drawn(f"{cluster.now:.3f} {number}", 30 + 17 * number % 200) for number in range(count)]
    named = [f"{cluster.now:.3f}-{number}" for number in range(count)]
    return [
        (cluster.ask(name, prompt, max_tokens), prompt, max_tokens)
        for name, prompt in zip(named, prompts, strict=True)
    ]


def check_all(cluster: StoryCluster, asked: list[tuple[Answer, list[int], int]]) -> None:
    cluster.until_over(*(answer for answer, _, _ in asked))
    for answer, prompt, max_tokens in asked:
        check_exact(answer, prompt, max_tokens)


@pytest.mark.parametrize("noticed", [True, False])
def test_BR_030_what_stands_in_a_dead_workers_line_goes_elsewhere(noticed: bool) -> None:
    """Acknowledged and not begun; the worker runs one prompt at a time and is killed."""
    cluster = StoryCluster(prefill=2, prefill_shape=ONE_AT_A_TIME)
    asked = ask_some(cluster, 6)
    cluster.until(lambda: len(cluster.workers[WorkerId("prefill-0")].node.live_keys()) >= 2)
    cluster.kill("prefill-0", noticed=noticed)
    began = cluster.now
    check_all(cluster, asked)
    assert cluster.now - began < (1.0 if noticed else 6.0)
    cluster.settle()


@pytest.mark.parametrize("lost", [Accept, Handover])
def test_BR_032_the_prefill_worker_dies_in_the_middle_of_an_agreement(lost: type[Message]) -> None:
    """After its offer was accepted and before it knows; after its last block and before the hand-over. The decode
    worker's reservation ends with the next heartbeat, not with the transfer's limit."""
    cluster = StoryCluster()
    cluster.fate = lambda message: None if isinstance(message, lost) else 0.0
    answer = cluster.ask("r", LONG)
    cluster.until(lambda: cluster.saw(lost) > 0)
    cluster.kill("prefill-0", noticed=True)
    cluster.go(1.2)
    cluster.until_over(answer)
    check_exact(answer, LONG)
    cluster.settle()


@pytest.mark.parametrize("at_once", [True, False])
def test_BR_034_all_decode_workers_are_replaced_under_their_names(at_once: bool) -> None:
    """The prefill worker lives on, with what it knew of the old lives: a hundred requests meet the new ones."""
    cluster = StoryCluster(decode=2)
    check_all(cluster, ask_some(cluster, 8))
    before = ask_some(cluster, 8, 40)
    cluster.go(0.1)
    for name in ("decode-0", "decode-1"):
        if not at_once:
            cluster.kill(name, noticed=True)
    if not at_once:
        cluster.go(1.0)
    for name in ("decode-0", "decode-1"):
        cluster.restart(name)
    cluster.go(0.2)
    check_all(cluster, ask_some(cluster, 100))
    cluster.until_over(*(answer for answer, _, _ in before))
    ends = {answer.end for answer, _, _ in before}
    assert ends <= {"length", "RequestFailed"}  # whoever ran on both of them
    assert all(answer.reason for answer, _, _ in before if answer.end != "length")
    cluster.settle()


def test_BR_035_two_seconds_without_a_link_put_nobody_on_a_list() -> None:
    cluster = StoryCluster()
    cluster.network.cut("prefill-0", "decode-0")
    during = ask_some(cluster, 1)
    cluster.go(2.0)
    cluster.network.restore("prefill-0", "decode-0")
    after = ask_some(cluster, 20)
    began = cluster.now
    check_all(cluster, [*during, *after])
    assert cluster.now - began < 5.0, "the peer is asked again, not skipped"
    assert cluster.counted("kv_transfer_bytes_total") > 0
    cluster.settle()


@pytest.mark.parametrize("piece", [0, 20, 39])
def test_BR_036_a_piece_that_is_never_sent_is_asked_for(piece: int) -> None:
    """The receiver says what it lacks; nothing half-written is ever taken for whole."""
    cluster = StoryCluster()
    left = 1

    def fate(message: Message) -> float | None:
        nonlocal left
        if isinstance(message, Block) and message.index == piece and left:
            left -= 1
            return None
        return 0.0

    cluster.fate = fate
    answer = cluster.ask("r", LONG)
    cluster.until_over(answer)
    check_exact(answer, LONG)
    assert left == 0 and cluster.counted("requests_migrated_total") == 0
    cluster.settle()


def test_BR_036_a_piece_that_cannot_be_sent_ends_the_transfer_and_not_the_request() -> None:
    cluster = StoryCluster()
    cluster.fate = lambda message: None if isinstance(message, Block) and message.index == 7 else 0.0
    answer = cluster.ask("r", LONG)
    cluster.until_over(answer)
    check_exact(answer, LONG)
    assert cluster.counted("kv_transfer_failures_total") >= 1
    cluster.settle()


def test_BR_037_a_prefill_worker_of_another_kind_among_good_ones() -> None:
    """It got past the door (an old coordinator, say): its offers are refused one by one, everybody else is served,
    and its own requests go on elsewhere."""
    cluster = StoryCluster(prefill=2)
    cluster.workers[WorkerId("prefill-0")].node._fingerprint = "another"
    check_all(cluster, ask_some(cluster, 12))
    assert cluster.counted("kv_transfer_failures_total") >= 1, "it was never chosen: the test is blunt"
    cluster.settle()


@pytest.mark.parametrize("noticed", [True, False])
def test_BR_039_affinity_never_outranks_liveness(noticed: bool) -> None:
    """Prompts that share a prefix, warm on one decode worker; it is killed, and a hundred come in ten seconds."""
    cluster = StoryCluster(prefill=2, decode=2)
    shared = drawn("shared", 160)
    prompts = [shared + drawn(f"r{number}", 5) for number in range(100)]
    for number in range(4):
        warm = cluster.ask(f"warm-{number}", shared)
        cluster.until_over(warm)
        check_exact(warm, shared)
    cluster.kill("decode-0", noticed=noticed)
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(cluster.ask(f"r{number}", prompt))
        cluster.go(0.1)
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, prompts, strict=True):
        check_exact(answer, prompt)
    slowest = max(answer.stamps[0] - answer.submitted for answer in answers[60:])
    assert slowest < 0.5, "long after the death somebody still waited for the dead one"
    cluster.settle()


def test_BR_046_kv_that_nobody_collects_has_an_owner() -> None:
    """Twenty prompts are computed while the decode worker hears nothing of them; then it does."""
    cluster = StoryCluster()
    cluster.network.stall("prefill-0", "decode-0")
    asked = ask_some(cluster, 20)
    cluster.go(3.0)
    cluster.network.restore("prefill-0", "decode-0")
    check_all(cluster, asked)
    cluster.settle()


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_BR_048_the_request_after_a_cancelled_prefill_does_not_hang(chunk: int) -> None:
    """Cancelled in each of its chunks, the next one asked for at once."""
    cluster = StoryCluster()
    cluster.ask("r", LONG)
    cluster.go(0.02 + 0.06 * chunk)
    assert cluster.phase_at("prefill-0", "r") is not None
    cluster.leave(RequestId("r"))
    began = cluster.now
    answer = cluster.ask("next", drawn("next", 100))
    cluster.until_over(answer)
    check_exact(answer, drawn("next", 100))
    assert answer.stamps[0] - began < 0.2
    cluster.settle()


def test_BR_052_after_a_burst_of_ten_times_what_fits_all_is_as_before() -> None:
    """Ten seconds of it: who does not fit is told at once, who is taken is served, and a probe right after the
    last one of them is as fast as before the first."""
    cluster = StoryCluster(
        prefill_shape=Shape(num_blocks=64, max_num_seqs=4), decode_shape=Shape(num_blocks=64, max_num_seqs=4)
    )
    cluster.cluster.queue._max_requests = 16
    probe = drawn("probe", 40)
    first = cluster.ask("before", probe)
    cluster.until_over(first)
    random = Random(1)
    asked: list[tuple[Answer, list[int]]] = []
    until = cluster.now + 10.0
    while cluster.now < until:
        prompt = drawn(f"burst{len(asked)}", random.randrange(60, 200))
        asked.append((cluster.ask(f"burst{len(asked)}", prompt, 40), prompt))
        cluster.go(random.expovariate(64))
    over_at = cluster.now
    cluster.until_over(*(answer for answer, _ in asked))
    assert cluster.now - over_at < 5.0
    served = [(answer, prompt) for answer, prompt in asked if answer.end == "length"]
    shed = [answer for answer, _ in asked if answer.end == "NotAdmitted"]
    assert len(served) + len(shed) == len(asked) and len(served) > 50 and len(shed) > len(served)
    for answer, prompt in served:
        check_exact(answer, prompt, 40)
    cluster.settle(1.0)
    again = cluster.ask("after", drawn("another", 40))
    cluster.until_over(again)
    assert again.stamps[-1] - again.submitted < 1.5 * (first.stamps[-1] - first.submitted)
    cluster.settle()


def test_BR_051_a_peer_that_refuses_is_told_to_the_client() -> None:
    """The only pair refuses whatever it is given: a structured error within 2 s, with the stage and the reason."""
    cluster = StoryCluster()
    for worker in cluster.workers.values():
        worker.node._cannot_ever = lambda _: "not of my kind"  # type: ignore[method-assign]
    began = cluster.now
    answer = cluster.ask("r", drawn("r", 40))
    cluster.until_over(answer)
    assert cluster.now - began < 2.0
    assert answer.end == "RequestFailed" and answer.reason == (
        "given up in queued after 5 attempts without a token: decode-0 refused: not of my kind"
    )
    cluster.settle()


def test_BR_049_transfers_are_named_by_us_and_offers_carry_the_name() -> None:
    """Whatever a client calls its request, both ends meet by the id and the attempt that the coordinator minted."""
    cluster = StoryCluster()
    names = ["a#b/c", "é" * 300, " ", "r", "r2"]
    answers = [cluster.ask(name, drawn("p", 40)) for name in names]
    cluster.until_over(*answers)
    offers = [message for message in cluster.seen if isinstance(message, Offer)]
    assert {offer.id for offer in offers} == set(names)
    assert len({offer.key for offer in offers}) == len(names)
    for answer in answers:
        check_exact(answer, drawn("p", 40))
    cluster.settle()
