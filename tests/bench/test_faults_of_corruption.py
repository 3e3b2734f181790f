"""Nobody's KV in anybody else's answer: group B of the faults that users have met, by their numbers, in virtual time.

A worker's model here remembers what each block holds and looks at all of it (`bench/virtual_model.py`), so a late
write, and a block that is used again or cached too early, fail the step that would have read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from bench.virtual_model import continuation
from bench.virtual_network import Fate, Parcel
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.messages import Abort, Accept, Block, Cancel, Cancelled, Handover, Message, Revoke, Role
from common.request import RequestId, WorkerId
from tests.bench.story_cluster import StoryCluster, check_exact, drawn

AT_ONCE_S = 0.02


@pytest.mark.parametrize("next_is", ["another request", "its own next attempt"])
def test_BR_018_late_blocks_of_one_attempt_touch_nobody(next_is: str) -> None:
    """A pool that holds one of them: what comes after A takes A's blocks while those of A are still on their way."""
    cluster = StoryCluster(2, 1, decode_shape=Shape(num_blocks=44))
    slow: list[int] = []

    def fate(message: Message) -> float | None:
        if isinstance(message, Block) and (not slow or message.attempt == slow[0]):
            slow[:] = [message.attempt]
            return 0.075 + 0.001 * message.index
        return 0.0

    cluster.fate = fate
    prompts = {"a": drawn("a", 600), "b": drawn("b", 600)}
    cluster.ask("a", prompts["a"], 80)
    cluster.until(lambda: cluster.phase_at("decode-0", "a") is not None and bool(slow))
    cluster.go(0.01)
    timeline = cluster.cluster.timeline(RequestId("a"), cluster.now)
    assert timeline is not None
    if next_is == "another request":
        cluster.leave(RequestId("a"))
        cluster.ask("b", prompts["b"], 80)
        name = "b"
    else:
        cluster.kill(timeline["prefill_worker"], noticed=True)
        name = "a"
    answer = cluster.answers[RequestId(name)]
    before = cluster.counted("late_messages_total")
    cluster.until_over(answer)
    check_exact(answer, prompts[name], 80)
    assert cluster.counted("late_messages_total") - before >= 3, "the late blocks came meanwhile"
    cluster.settle()


@pytest.mark.parametrize("ack_is_lost", [False, True])
@pytest.mark.parametrize("station", ["before the first block", "mid-transfer", "after the last block"])
def test_BR_019_every_end_is_acknowledged_once_and_at_once(station: str, ack_is_lost: bool) -> None:
    cluster = StoryCluster()
    lost: list[Message] = []

    def fate(message: Message) -> float | None:
        if ack_is_lost and isinstance(message, Cancelled) and not lost:
            lost.append(message)
            return None
        if isinstance(message, Block):
            return {"before the first block": 0.5, "mid-transfer": 0.1 * (message.index > 12)}.get(
                station, 0.0
            )
        return 0.3 if isinstance(message, Handover) else 0.0

    cluster.fate = fate
    cluster.ask("r", drawn("r", 640))
    moved = {"before the first block": 0, "mid-transfer": 8000, "after the last block": 40_000}[station]
    cluster.until(
        lambda: (
            cluster.phase_at("decode-0", "r") == "kv_ready"
            and cluster.counted("kv_transfer_bytes_total") >= moved
        )
    )
    if station == "before the first block":
        cluster.go(0.2)
    cluster.leave(RequestId("r"))
    cluster.go(AT_ONCE_S)
    assert "decode-0" not in cluster.held(), "no limit had to run out"
    cluster.go(1.1)
    assert cluster.held() == {} and len(lost) == ack_is_lost
    assert cluster.saw(Cancel) == cluster.saw(Cancelled) > 0
    for worker in cluster.workers.values():
        assert worker.transfers.settled
    cluster.settle()


@dataclass(frozen=True, slots=True)
class Unread:
    """A block that its receiver reads when the word of it comes, as with shared memory; what it was is its checksum."""

    holder: VirtualWorker
    block: int
    was: list[int]


class ReadLate(VirtualWorker):
    def read_block(self, block: int) -> object:
        content = super().read_block(block)
        assert isinstance(content, list)
        return Unread(self, block, content)


class SharedMemoryCluster(StoryCluster):
    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> VirtualWorker:
        return ReadLate(name, role, shape, step_time)

    def read_on_arrival(self) -> None:
        for name, receive in list(self.network._receive.items()):
            self.network.join(name, self._reading(receive))

    @staticmethod
    def _reading(receive: Callable[[Parcel, bool], None]) -> Callable[[Parcel, bool], None]:
        def read(parcel: Parcel, intact: bool) -> None:
            unread = parcel.content
            if isinstance(unread, Unread):
                found = list(unread.holder.model.content[unread.block])
                parcel, intact = replace(parcel, content=found), intact and found == unread.was
            receive(parcel, intact)

        return read


def test_BR_020_source_blocks_are_used_again_while_they_are_read() -> None:
    """A prefill pool for two prompts, a slow link, clients that leave: freed blocks are written over at once. Whoever
    reads them then finds the checksum wrong."""
    shape = Shape(num_blocks=45, max_num_batched_tokens=64, prefix_caching=False)
    cluster = SharedMemoryCluster(prefill_shape=shape)
    cluster.read_on_arrival()
    random = Random(4)
    cluster.fate = lambda message: random.uniform(0.0, 0.2) if isinstance(message, Block) else 0.0
    usual = cluster.network.policy

    def tells_the_receiver_late(parcel: Parcel) -> Fate:
        ends = parcel.target == "decode-0" and isinstance(parcel.message, Abort | Cancel)
        return Fate((0.3,)) if ends else usual(parcel)

    cluster.network.policy = tells_the_receiver_late
    prompts = {f"r{number}": drawn(f"r{number}", 300) for number in range(40)}
    for number, (name, prompt) in enumerate(prompts.items()):
        cluster.ask(name, prompt)
        if number % 3 == 2:
            cluster.until(lambda n=name: cluster.phase_at("decode-0", n) is not None)  # type: ignore[misc]
            cluster.go(random.uniform(0.0, 0.1))
            cluster.leave(RequestId(name))
    cluster.until_over(*cluster.answers.values())
    for name, prompt in prompts.items():
        answer = cluster.answers[RequestId(name)]
        assert answer.ids == continuation(prompt, 8)[: len(answer.ids)] and answer.end in ("length", "left")
    assert [a.end for a in cluster.answers.values()].count("length") >= 26
    assert cluster.counted("kv_checksum_failures_total") > 0, "nobody read what was written over"
    cluster.settle()


@pytest.mark.parametrize("cut_s", [2.0, 40.0])
def test_BR_023_a_link_that_was_cut_during_a_transfer(cut_s: float) -> None:
    """Shorter and longer than a transfer may stand still: nothing of the half of it that came is found later."""
    cluster = StoryCluster()
    known = {f"k{number}": drawn(f"k{number}", 100 + 20 * number) for number in range(20)}
    prompt = drawn("cut", 640)
    cluster.fate = lambda message: 0.02 if isinstance(message, Block) else 0.0
    answer = cluster.ask("cut", prompt)
    cluster.until(lambda: cluster.counted("kv_transfer_bytes_total") > 3000)
    cluster.network.cut("prefill-0", "decode-0")
    cluster.go(cut_s)
    cluster.network.restore("prefill-0", "decode-0")
    cluster.until_over(answer)
    check_exact(answer, prompt)
    known["again"] = prompt
    for name, wanted in known.items():
        cluster.until_over(cluster.ask(name, wanted))
        check_exact(cluster.answers[RequestId(name)], wanted)
    cluster.settle()


def test_BR_024_what_an_aborted_prompt_has_computed_is_found_whole_or_not_at_all() -> None:
    """It is left during its second chunk of four; then the same prompt comes five times."""
    cluster = StoryCluster(prefill_shape=Shape(max_num_batched_tokens=64))
    prompt = drawn("r", 256)
    cluster.ask("r", prompt)
    cluster.until(
        lambda: cluster.counted("computed_tokens_total") == 64 and cluster.is_computing("prefill-0")
    )
    cluster.leave(RequestId("r"))
    for number in range(5):
        answer = cluster.ask(f"again-{number}", prompt)
        cluster.until_over(answer)
        check_exact(answer, prompt)
    assert cluster.counted("prefix_cache_hits_total") > 0
    cluster.settle()


@pytest.mark.parametrize("given_up", ["on its way", "after it came"])
def test_BR_025_what_was_accepted_is_given_up_again(given_up: str) -> None:
    """Running answers grow into the room of accepted transfers, which are revoked, or into that of delivered ones,
    which are computed anew: every position is what it was."""
    cluster = StoryCluster(decode_shape=Shape(num_blocks=40, max_num_seqs=8))
    if given_up == "on its way":
        slow = {RequestId(f"r{number}") for number in range(1, 8, 2)}
        cluster.fate = lambda message: 0.4 if isinstance(message, Block) and message.id in slow else 0.0
    prompts = {f"r{number}": drawn(f"r{number}", 90 + number) for number in range(8)}
    answers = []
    for name, prompt in prompts.items():
        answers.append(cluster.ask(name, prompt, 120))
        cluster.go(0.08)
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, prompts.values(), strict=True):
        check_exact(answer, prompt, 120)
    if given_up == "on its way":
        assert cluster.saw(Revoke) > 0 and cluster.saw(Accept) > 8
    else:
        assert cluster.counted("num_preemptions_total") > 0
    cluster.settle()


def test_BR_027_ten_prompts_say_the_same_all_day_long() -> None:
    """Twenty-four rounds of them, between answers that are left, pools that are full, and workers that die."""
    shape = Shape(num_blocks=40, max_num_seqs=8)
    cluster = StoryCluster(2, 2, prefill_shape=shape, decode_shape=shape)
    random = Random(27)
    known = {f"k{number}": drawn(f"k{number}", random.randint(1, 300)) for number in range(10)}
    for round in range(24):
        crowd = [f"c{round}-{number}" for number in range(6)]
        for name in crowd:
            cluster.ask(name, drawn(name, random.randint(1, 400)), random.randint(1, 150))
        cluster.go(random.uniform(0.0, 0.2))
        for name in crowd[::2]:
            cluster.leave(RequestId(name))
        answers = [cluster.ask(f"{round}-{name}", prompt) for name, prompt in known.items()]
        if round % 8 == 5:
            victim = random.choice(list(cluster.workers))
            cluster.kill(victim, noticed=True)
            cluster.at(cluster.now + 0.5, lambda v=victim: cluster.restart(v))  # type: ignore[misc]
        cluster.until_over(*answers)
        for answer, prompt in zip(answers, known.values(), strict=True):
            check_exact(answer, prompt)
    cluster.until_over(*cluster.answers.values())
    assert cluster.counted("num_preemptions_total") > 0
    cluster.settle()


def test_the_model_here_sees_a_block_that_somebody_else_wrote() -> None:
    """What the tests of this file rest on."""
    cluster = StoryCluster()
    cluster.ask("r", drawn("r", 100), 200)
    cluster.until(lambda: cluster.phase_at("decode-0", "r") == "decoding")
    worker = cluster.workers[WorkerId("decode-0")]
    (seq,) = cluster.decode_node()._scheduler.held.sequences()
    worker.model.content[seq.blocks[2]] = [1] * 16
    with pytest.raises(AssertionError, match="holds"):
        cluster.go(1.0)
