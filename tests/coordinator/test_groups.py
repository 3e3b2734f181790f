"""A group of requests is one to its client: taken in whole or not at all, one stream, one end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from common.errors import BadRequest, KvferryError, RequestFailed
from common.front_messages import Admitted, CancelRequest, Progress, Rejected, RequestEnded, RequestFinished
from common.messages import Accepted, FinishReason, Message, Prefill, Sender, Started, TokenRow, Tokens
from common.request import (
    Attempt,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    first_attempt_of_epoch,
    pack_ids,
)
from coordinator.cluster import Cluster
from coordinator.control_plane import FRONT, ControlPlane, _rejection
from coordinator.metrics import Metrics
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.streams import MailboxStream
from tests.coordinator.cluster_bench import ClusterBench, address, card, request

IDS = tuple(RequestId(name) for name in ("r", "r.1", "r.2"))


# ---------------------------------------------------------------- admission


def test_all_or_none() -> None:
    bench = ClusterBench("p0", "d0", max_requests=4)
    bench.submit(*(request(f"a{number}", 512 - 5) for number in range(3)))
    assert [type(said) for said in bench.fronts] == [Admitted] and len(bench.told) == 1
    assert bench.cluster.num_waiting() == 2
    bench.submit(*(request(f"b{number}") for number in range(3)))
    assert isinstance(bench.fronts[-1], Rejected) and bench.fronts[-1].error == "NotAdmitted"
    assert bench.fronts[-1].id == "b0" and bench.fronts[-1].retry_after_s > 0
    assert bench.cluster.num_waiting() == 2, "none of it was taken in"
    bench.submit(*(request(f"c{number}", 512 - 5) for number in range(2)))
    assert isinstance(bench.fronts[-1], Admitted) and bench.cluster.num_waiting() == 4


@pytest.mark.parametrize(("count", "tokens"), [(5, 20), (3, 400)])
def test_what_could_never_wait_here_is_no_matter_of_later(count: int, tokens: int) -> None:
    bench = ClusterBench("p0", "d0", max_requests=4, max_tokens=1000)
    bench.submit(*(request(f"a{number}", tokens) for number in range(count)))
    assert isinstance(bench.fronts[-1], Rejected)
    assert (bench.fronts[-1].error, bench.fronts[-1].code) == ("BadRequest", "too_many_choices")
    assert bench.fronts[-1].param == "prompt"
    bench.check_settled()


def test_too_many_choices_of_one_prompt_are_too_large_an_n() -> None:
    bench = ClusterBench("p0", "d0", max_requests=4)
    one, *others = (request(f"a{number}") for number in range(5))
    bench.submit(replace(one, leader="a0"), *(replace(other, leader="a0") for other in others))
    assert isinstance(bench.fronts[-1], Rejected)
    assert _rejection(bench.fronts[-1], draining=False).param == bench.fronts[-1].param == "n"


def test_one_that_cannot_fit_refuses_all() -> None:
    bench = ClusterBench("p0", "d0")
    bench.submit(request("a"), request("b", 600), request("c"))
    assert isinstance(bench.fronts[-1], Rejected) and bench.fronts[-1].code == "context_length_exceeded"
    bench.check_settled()


# ---------------------------------------------------------------- one stream, one end


class Plane:
    """A real control plane whose cluster has two workers that never answer."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        cluster = Cluster(
            Registry(tokenizer_hash="t", fronts={FRONT: "f"}),
            WaitingQueue(max_requests=8, max_tokens=1000),
            first_attempt=first_attempt_of_epoch(1),
        )
        for name in ("p0", "d0"):
            # By the plane's own clock: its first timer would find workers that were heard at 0 lost.
            cluster.from_worker(card(name, dtype=dtype), Sender(name, Incarnation(1)), time.monotonic())
        self.cluster = cluster
        self.plane = ControlPlane(cluster, Metrics(("default",)), collocated=False, request_timeout_s=60)
        self._seq = 0

    async def submit(self) -> MailboxStream:
        sampling = SamplingParams(max_tokens=9)
        return await self.plane.submit([Request(id, pack_ids([1, 2]), sampling, FRONT) for id in IDS])

    def say(self, choice: int, first: int, *ids: int, finish: FinishReason | None = None) -> None:
        tracked = self.cluster.tracker.get(IDS[choice])
        attempt = Attempt(1) if tracked is None else tracked.attempt
        row = TokenRow(IDS[choice], attempt, first, ids, finish=finish, cached_tokens=choice)
        self._seq += 1
        self.plane._take_tokens(Tokens(self._seq, (row,)), Sender("d0", Incarnation(1)))

    def check_idle(self) -> None:
        assert self.cluster.settled and len(self.plane._front) == 0
        assert not self.plane._streams and not self.plane._limits


def played(scene: Callable[[Plane], Awaitable[None]]) -> None:
    async def play() -> None:
        plane = Plane()
        try:
            await scene(plane)
            plane.check_idle()
        finally:
            await plane.plane.close()

    asyncio.run(play())


async def heard(stream: MailboxStream, count: int) -> list[tuple[int, tuple[int, ...], str | None, int]]:
    deltas = [await asyncio.wait_for(stream.next(), 1) for _ in range(count)]
    return [(delta.choice, delta.ids, delta.finish, delta.cached_tokens) for delta in deltas]


def test_each_delta_says_whose_it_is() -> None:
    async def scene(plane: Plane) -> None:
        stream = await plane.submit()
        assert stream.request_id == "r"
        plane.say(1, 0, 7)
        plane.say(0, 0, 8)
        plane.say(1, 1, 9, finish="stop")
        assert await heard(stream, 3) == [(1, (7,), None, 1), (0, (8,), None, 0), (1, (9,), "stop", 1)]
        assert not stream.over
        plane.say(0, 1, finish="length")
        plane.say(2, 0, 5, finish="length")
        assert await heard(stream, 2) == [(0, (), "length", 0), (2, (5,), "length", 2)]
        assert stream.over

    played(scene)


def test_a_stop_ends_one_choice_and_what_it_said_meanwhile() -> None:
    async def scene(plane: Plane) -> None:
        stream = await plane.submit()
        plane.say(1, 0, 7)
        plane.say(0, 0, 8)
        stream.stop(1)
        stream.stop(1)
        plane.say(1, 1, 9)
        assert await heard(stream, 1) == [(0, (8,), None, 0)]
        assert plane.cluster.tracker.get(IDS[1]) is None and plane.cluster.tracker.get(IDS[0]) is not None
        stream.stop(0)
        stream.stop(2)

    played(scene)


def test_a_client_that_leaves_ends_them_all_once() -> None:
    async def scene(plane: Plane) -> None:
        stream = await plane.submit()
        plane.say(1, 0, 7, finish="length")
        stream.cancel("the client left")
        stream.cancel("again")
        aborted = [v for k, v in plane.cluster.counters.values.items() if k.startswith("requests_aborted")]
        assert sum(aborted) == 2

    played(scene)


@pytest.mark.parametrize("failed", [0, 2])
def test_one_that_fails_fails_all_once(failed: int) -> None:
    async def scene(plane: Plane) -> None:
        stream = await plane.submit()
        plane.say(1, 0, 7)
        tracked = plane.cluster.tracker.get(IDS[failed])
        assert tracked is not None
        plane.plane._carry_out(plane.cluster._attempts.fail(tracked, "RequestFailed", "so it was", 1.0))
        assert await heard(stream, 1) == [(1, (7,), None, 1)], "what had come can be read"
        with pytest.raises(RequestFailed, match="so it was"):
            await stream.next()

    played(scene)


def test_a_group_over_its_time_and_one_that_a_stop_cuts() -> None:
    async def scene(plane: Plane) -> None:
        stream = await plane.submit()
        plane.plane._give_up(stream, plane.plane._over_time())
        with pytest.raises(KvferryError, match="over 60 s"):
            await stream.next()
        stream = await plane.submit()
        await plane.plane.drain(0.01)
        with pytest.raises(KvferryError, match="shutting down"):
            await stream.next()

    played(scene)


def test_a_group_that_is_refused_leaves_nothing() -> None:
    async def scene(plane: Plane) -> None:
        sampling = SamplingParams(max_tokens=9)
        many = [Request(RequestId(f"x{n}"), pack_ids([1]), sampling, FRONT) for n in range(9)]
        with pytest.raises(BadRequest, match="9 choices at once"):
            await plane.plane.submit(many)

    played(scene)


def test_the_first_ones_timeline_lists_the_others() -> None:
    bench = ClusterBench("p0", "d0")
    bench.submit(request("a"), request("a.1"), request("a.2"))
    timeline, other = (bench.cluster.timeline(RequestId(name), 1.0) for name in ("a", "a.1"))
    assert timeline is not None and timeline["choices"] == ["a.1", "a.2"]
    assert other is not None and other["choices"] == []


# ---------------------------------------------------------------- a family's waits have limits


def family(n: int, tokens: int = 20) -> list[Request]:
    main = replace(request("a", tokens), leader="a")
    return [main] + [
        replace(main, request_id=RequestId(f"a.{child}"), sampling=SamplingParams(5, child=child))
        for child in range(1, n)
    ]


def commands(told: list[tuple[str, Message]]) -> list[Prefill]:
    return [message for _, message in told if isinstance(message, Prefill)]


def test_followers_wait_for_the_leaders_prompt_but_not_for_ever() -> None:
    bench = ClusterBench("p0", "d0")
    (first,) = commands(bench.submit(*family(3)))
    bench.say("p0", Accepted(*first.key, address("d0")))
    for second in range(1, 120):
        bench.beat_all((first.key, "kv_ready"), at=float(second))
    assert not commands(bench.told[1:]) and bench.cluster.num_waiting() == 2
    bench.beat_all((first.key, "kv_ready"), at=120.5)
    assert [command.id for command in commands(bench.told[1:])] == ["a.1", "a.2"]


def test_followers_go_when_the_decode_worker_has_the_prompt_and_not_before() -> None:
    bench = ClusterBench("p0", "d0")
    (first,) = commands(bench.submit(*family(3)))
    bench.say("p0", Accepted(*first.key, address("d0")))
    assert not bench.say("p0", Started(*first.key, "prefilling"))
    assert not bench.front(Progress(((first.id, 0, (7,)),))), (
        "the first token is out, the KV is not there yet"
    )
    told = bench.say("d0", Started(*first.key, "decode_ready"))
    assert [command.id for command in commands(told)] == ["a.1", "a.2"]


def test_in_waves_each_end_gives_the_others_their_time_again() -> None:
    """Five blocks: the leader takes three, a follower two. The last one gets no room for a long time."""
    bench = ClusterBench("p0")
    bench.join("d0", blocks=5)
    (first,) = commands(bench.submit(*family(4)))
    bench.say("p0", Accepted(*first.key, address("d0")))
    bench.front(Progress(((first.id, 0, (7,)),)))
    (second,) = commands(bench.say("d0", Started(*first.key, "decode_ready")))
    live = [(first.key, "decoding"), (second.key, "decoding")]
    for key in (first.key, second.key):
        bench.say("p0", Accepted(*key, address("d0")))
    for at in range(1, 100):
        bench.beat_all(*live, at=float(at))
    (third,) = commands(bench.front(RequestFinished(first.id, "length")))
    bench.say("p0", Accepted(*third.key, address("d0")))
    live = [(second.key, "decoding"), (third.key, "decoding")]
    for at in range(100, 218):
        bench.beat_all(*live, at=float(at))
    assert not [said for said in bench.fronts if isinstance(said, RequestEnded)]
    bench.beat_all(*live, at=220.0)
    (ended,) = [said for said in bench.fronts if isinstance(said, RequestEnded)]
    assert (ended.id, ended.error) == ("a.3", "DeadlinePassed")


def test_what_is_held_counts_in_the_queue() -> None:
    bench = ClusterBench("p0", "d0", max_requests=5)
    bench.submit(*family(5))
    bench.submit(request("b"), request("c"))
    assert isinstance(bench.fronts[-1], Rejected) and bench.fronts[-1].error == "NotAdmitted"
    assert bench.cluster.queue.age_s(3.0) == 3.0
    for child in ("a.1", "a", "a.2", "a.3", "a.4"):
        bench.front(CancelRequest(RequestId(child), "left"))
    bench.check_settled()
    assert bench.cluster.queue.tokens == 0


# ---------------------------------------------------------------- who answered


def test_the_fingerprint_is_of_what_decides_the_bits() -> None:
    def seen(dtype: str) -> str:
        async def ask() -> str:
            plane = Plane(dtype)
            try:
                return plane.plane.system_fingerprint()
            finally:
                await plane.plane.close()

        return asyncio.run(ask())

    assert re.fullmatch("fp_[0-9a-f]{10}", seen("bfloat16"))
    assert seen("bfloat16") == seen("bfloat16") != seen("float16")
