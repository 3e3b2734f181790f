"""What a client is told when the cluster says no, or the service stops, by a real control plane without workers."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import BadRequest, DeadlinePassed, KvferryError, NotAdmitted, NoWorker, RequestFailed
from common.front_messages import Rejected, RequestEnded
from common.messages import FinishReason, Sender, TokenRow, Tokens
from common.request import (
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    first_attempt_of_epoch,
    pack_ids,
)
from coordinator.cluster import Cluster
from coordinator.control_plane import FRONT, ControlPlane, _rejection
from coordinator.metrics import Metrics
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.streams import MailboxStream
from tests.coordinator.cluster_bench import card

ID = RequestId("r")


def plane() -> ControlPlane:
    registry = Registry(
        tokenizer_hash="t", fronts={}, heartbeat_interval_s=1, lost_after_s=5, hung_after_s=30
    )
    queue = WaitingQueue(max_requests=8, max_tokens=1000)
    cluster = Cluster(
        registry, queue, first_attempt=first_attempt_of_epoch(1), max_wait_s=60, unheld_after_s=5
    )
    return ControlPlane(cluster, Metrics(("default",)), collocated=False, request_timeout_s=60)


def waiting(plane: ControlPlane) -> MailboxStream:
    """An answer that its client waits for."""
    return plane._open([Request(ID, pack_ids([1]), SamplingParams(max_tokens=1), FRONT)])


async def failure(stream: MailboxStream) -> KvferryError:
    with pytest.raises(KvferryError) as failed:
        await stream.next()
    return failed.value


def test_BR_142_who_is_cut_by_the_stop_and_who_comes_after_it_hear_that_it_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def scene() -> list[KvferryError]:
        service = plane()
        try:
            stream = waiting(service)
            await service.drain(0.01)
            with pytest.raises(NoWorker) as late:
                await service.submit(
                    [Request(ID, pack_ids([1]), SamplingParams(max_tokens=1, seed=0), FRONT)]
                )
            return [await failure(stream), late.value]
        finally:
            await service.close()

    for error in asyncio.run(scene()):
        assert (error.status, error.code) == (503, "shutting_down")
        assert error.message == "The service is shutting down."
    assert "draining; requests under way: 1" in caplog.text


def test_whoever_moves_the_last_prefill_worker_wants_none() -> None:
    """It is one that was lost that is missed."""

    async def scene() -> list[str | None]:
        service = plane()

        def join(name: str, life: int) -> None:
            sender = Sender(name, Incarnation(life))
            service._cluster.from_worker(card(name, life), sender, time.monotonic())

        try:
            for name in ("p0", "d0"):
                join(name, 1)
            said = [service.health()]
            row = service.set_role("p0", "decode", 1.0)
            assert row is not None and row["becomes"] == "decode"
            said.append(service.health())
            service._process_ended(WorkerId("p0"), Incarnation(1))
            join("decode-from-p0", 2)
            said.append(service.health())
            join("p1", 1)
            said.append(service.health())
            service._process_ended(WorkerId("p1"), Incarnation(1))
            return [*said, service.health()]
        finally:
            await service.close()

    assert asyncio.run(scene()) == [None] * 4 + ["No prefill worker is ready."]


def test_without_a_worker() -> None:
    async def scene() -> None:
        service = plane()
        try:
            await service.submit([Request(ID, pack_ids([1]), SamplingParams(max_tokens=1, seed=0), FRONT)])
        finally:
            await service.close()

    with pytest.raises(NoWorker) as refused:
        asyncio.run(scene())
    assert refused.value.code == "no_worker"


@pytest.mark.parametrize("finish", [None, "length"])
def test_a_first_token_after_its_deadline_reaches_nobody(finish: FinishReason | None) -> None:
    """Between two looks at the clock too; and the worker is told."""

    async def scene() -> tuple[KvferryError, float, bool]:
        service = plane()
        worker = Sender("d0", Incarnation(1))
        try:
            service._cluster.from_worker(card("d0"), worker, time.monotonic())
            asked = [Request(ID, pack_ids([1]), SamplingParams(max_tokens=1), FRONT)]
            stream = await service.submit(asked, deadline_s=9.0)
            tracked = service._cluster.tracker.get(ID)
            assert tracked is not None
            tracked.deadline = time.monotonic()
            service._take_tokens(Tokens(1, (TokenRow(ID, tracked.attempt, 0, (7,), finish=finish),)), worker)
            return await failure(stream), service._front.late_rows, service._cluster.settled
        finally:
            await service.close()

    ended, late_rows, settled = asyncio.run(scene())
    assert (type(ended), ended.code, late_rows, settled) == (DeadlinePassed, "deadline", 1, True)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ("NotAdmitted", NotAdmitted, "not_admitted"),
        ("NoWorker", NoWorker, "no_worker"),
        ("BadRequest", BadRequest, "invalid_value"),
        ("NeverHeardOf", RequestFailed, "request_failed"),
    ],
)
def test_every_rejection_has_a_code(error: str, kind: type[KvferryError], code: str) -> None:
    raised = _rejection(Rejected(ID, error, "it is full"), draining=False)
    assert (type(raised), raised.code, raised.message) == (kind, code, "It is full.")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ("DeadlinePassed", DeadlinePassed, "deadline"),
        ("RequestFailed", RequestFailed, "request_failed"),
        ("NoWorker", NoWorker, "no_worker"),
        ("NeverHeardOf", RequestFailed, "request_failed"),
    ],
)
def test_every_end_that_is_a_failure_has_a_code(error: str, kind: type[KvferryError], code: str) -> None:
    async def scene() -> KvferryError:
        service = plane()
        try:
            stream = waiting(service)
            service._ended(RequestEnded(ID, error, "so it was"))
            return await failure(stream)
        finally:
            await service.close()

    ended = asyncio.run(scene())
    assert (type(ended), ended.code) == (kind, code)
