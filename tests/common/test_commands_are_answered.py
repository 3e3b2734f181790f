"""Abort, Stop and Cancel on both kinds of worker: each is answered once, also for what is unknown or ended."""

from __future__ import annotations

import pytest

from bench.virtual_worker import FINGERPRINT, Shape, StepTime, VirtualWorker
from common.effects import Effect, ToCoordinator, ToReceiver, ToSender
from common.messages import (
    Abort,
    AboutRequest,
    Accepted,
    Cancel,
    Cancelled,
    Decode,
    Ended,
    Message,
    Offer,
    Prefill,
    Role,
    Stop,
)
from common.request import Attempt, FrontId, Key, Request, RequestId, SamplingParams, WorkerId, pack_ids

R = RequestId("r")
REQUEST = Request(R, pack_ids(range(40)), SamplingParams(8), FrontId("front"))
COORDINATOR = WorkerId("coordinator")
PEER = {"prefill": WorkerId("decode"), "decode": WorkerId("prefill")}
ROLES: tuple[Role, ...] = ("prefill", "decode")
COMMANDS = (Abort, Stop)


def worker_of(role: Role) -> VirtualWorker:
    return VirtualWorker(role, role, Shape(), StepTime())


def key(attempt: int, request_id: RequestId = R) -> Key:
    return request_id, Attempt(attempt)


def command_of(kind: type[Message], about: Key) -> AboutRequest:
    return Stop(*about) if kind is Stop else Abort(*about, "client left")


def dispatched(worker: VirtualWorker, attempt: int) -> list[Effect]:
    about = key(attempt)
    if worker.role == "decode":
        return worker.node.handle(Decode(*about, REQUEST, b""), COORDINATOR, 0.0)
    target = VirtualWorker("decode", "decode", Shape(), StepTime()).address
    return worker.node.handle(Prefill(*about, REQUEST, b"", target), COORDINATOR, 0.0)


def answer(worker: VirtualWorker, message: AboutRequest) -> Ended:
    """The only thing that is said to it, to the coordinator."""
    told = [e.message for e in worker.node.handle(message, COORDINATOR, 1.0) if isinstance(e, ToCoordinator)]
    (ended,) = told
    assert isinstance(ended, Ended) and ended.key == message.key
    return ended


def late(worker: VirtualWorker) -> float:
    return worker.node.records.counters.total("late_messages_total")


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("role", ROLES)
def test_a_command_about_any_attempt_but_the_live_one_changes_nothing(
    role: Role, kind: type[Message]
) -> None:
    worker = worker_of(role)
    dispatched(worker, 3)
    (accepted,) = [e.message for e in dispatched(worker, 5) if isinstance(e, ToCoordinator)]
    assert isinstance(accepted, Accepted)
    worker.node.turn(0.0)
    before = late(worker)
    assert answer(worker, command_of(kind, key(3))).outcome == "aborted", "a later attempt has ended it"
    for unknown in (key(1), key(4), key(9), key(5, RequestId("other"))):
        for _ in range(2):
            assert answer(worker, command_of(kind, unknown)).outcome == "unknown"
    assert late(worker) - before == 9
    assert worker.node.live_keys() == [key(5)]


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("role", ROLES)
def test_a_command_said_again_is_answered_again_alike(role: Role, kind: type[Message]) -> None:
    """As often as it comes, and whichever of the two comes after: how it ended does not change."""
    worker = worker_of(role)
    dispatched(worker, 1)
    first = answer(worker, command_of(kind, key(1)))
    assert first.outcome == ("finished" if kind is Stop else "aborted")
    assert [answer(worker, command_of(again, key(1))) for again in (kind, *COMMANDS)] == [first] * 3
    worker.check_idle()


@pytest.mark.parametrize("role", ROLES)
def test_a_cancel_is_answered_whatever_it_is_about(role: Role) -> None:
    """Unknown, under way, said again, and another's: one `Cancelled` each, and nothing is left."""
    worker, peer = worker_of(role), PEER[role]
    if role == "prefill":
        dispatched(worker, 2)
        worker.node.schedule(0.0)  # the first chunk: it is offered
        worker.node.turn(0.0)
    else:
        offer = Offer(*key(2), REQUEST, b"", 40, b"", FINGERPRINT)
        worker.node.handle(offer, peer, 0.0)
    assert worker.node.live_keys() == [key(2)]
    for about in (key(1), key(7), key(2, RequestId("other")), key(2), key(2)):
        effects = worker.node.handle(Cancel(*about, "called off"), peer, 1.0)
        said = [effect.message for effect in effects if isinstance(effect, ToReceiver | ToSender)]
        assert said == [Cancelled(*about)]
    assert worker.node.live_keys() == [] and worker.transfers.settled
    worker.pool.check()
