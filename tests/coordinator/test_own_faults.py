"""Where the coordinator itself errs over one request: that one fails at once, with its client told, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import IllegalMove
from common.front_messages import Progress, RequestEnded, RequestFinished
from common.messages import Abort, Accepted, HeartbeatAck, Started
from common.request import RequestId
from tests.coordinator.cluster_bench import ClusterBench, address, heartbeat

A, B = RequestId("a"), RequestId("b")


def pair() -> ClusterBench:
    return ClusterBench("p0", "d0")


def check_only_a_failed(bench: ClusterBench) -> None:
    """And "b" comes to its end."""
    failed = [m for m in bench.fronts if isinstance(m, RequestEnded)]
    assert [m.id for m in failed] == [A]
    assert failed[0].error == "RequestFailed" and failed[0].reason.startswith("a fault of ours")
    assert bench.phase("a") == "failed"
    told = [worker for worker, m in bench.told if isinstance(m, Abort) and m.id == A]
    assert told == ["p0", "d0"], "who may hold it lets it go"
    assert bench.cluster.counters.values["internal_errors_total"] == 1
    assert any("Traceback" in notice for notice in bench.cluster.notices)
    bench.front(RequestFinished(B, "length"))
    bench.check_settled()


@pytest.mark.parametrize("kind", ["answer", "heartbeat"])
def test_a_workers_word_that_cannot_be_handled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pair()
    a, prefill, decode = bench.dispatched("a")
    b, _, _ = bench.accepted("b")
    real = bench.cluster._attempts.worker_says

    def advance(tracked: Any, *others: Any) -> None:
        if tracked.id == A:
            raise IllegalMove("a request cannot go back")
        real(tracked, *others)

    monkeypatch.setattr(bench.cluster._attempts, "worker_says", advance)
    if kind == "answer":
        bench.say(prefill, Accepted(*a, address(decode)))
        bench.say(prefill, Started(*a, "prefilling"))
    else:
        told = bench.say(prefill, heartbeat((a, "prefilling"), (b, "prefilling")))
        assert told[0] == (prefill, HeartbeatAck(True))
        assert bench.phase("b") == "prefilling"
    check_only_a_failed(bench)


def test_tokens_that_cannot_be_handled() -> None:
    """A message's later rows are as good as if it had not been there."""
    bench = pair()
    bench.accepted("a")
    bench.accepted("b")
    bench.front(Progress(((A, 7, (1,)), (B, 0, (1, 2)))))
    tracked = bench.cluster.tracker.get(B)
    assert tracked is not None and tracked.outputs == [1, 2]
    check_only_a_failed(bench)


def test_what_is_about_no_request_is_raised() -> None:
    """Nobody can be blamed for it; the reader counts it and goes on."""
    bench = pair()
    bench.cluster.registry.heartbeat = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        bench.say("p0", heartbeat())
