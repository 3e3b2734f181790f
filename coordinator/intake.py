"""What the front submits: a group of requests is taken into the queue or rejected at once, whole. Pure."""

from __future__ import annotations

from common.counters import Counters
from common.effects import Effect, ToFront
from common.front_messages import Admitted, Rejected, Submit
from common.request import Request, RequestId
from coordinator.admission import Admission
from coordinator.attempts import Attempts
from coordinator.dispatcher import Dispatcher
from coordinator.tracker import Family, Tracked, Tracker


class Intake:
    def __init__(
        self,
        admission: Admission,
        tracker: Tracker,
        dispatcher: Dispatcher,
        attempts: Attempts,
        counters: Counters,
    ) -> None:
        self._admission = admission
        self._tracker = tracker
        self._dispatcher = dispatcher
        self._attempts = attempts
        self._counters = counters

    def submit(self, message: Submit, now: float, *, draining: bool) -> list[Effect]:
        main = message.requests[0]
        rejection = self._admission.rejection(message.requests, draining=draining)
        forecast = None
        if rejection is None:
            forecast = self._admission.forecast(main, now)
            rejection = None if forecast is None else self._admission.late(main, forecast)
        if rejection is not None:
            return self._rejected(main, rejection)
        deadline = None if message.deadline_s is None else now + message.deadline_s
        first = self._admit(main, deadline, now)
        first.forecast = forecast
        first.choices = tuple(self._admit(request, deadline, now).id for request in message.requests[1:])
        return [ToFront(main.front, Admitted(main.request_id))]

    def _rejected(self, main: Request, rejection: Rejected) -> list[Effect]:
        self._counters.add("requests_rejected_total", reason=rejection.error)
        return [ToFront(main.front, rejection)]

    def _admit(self, request: Request, deadline: float | None, now: float) -> Tracked:
        assert self._tracker.get(request.request_id) is None, "request ids are minted once"
        leader = self._tracker.get(RequestId(request.leader)) if request.follows else None
        if leader is not None and leader.family is not None:  # its first token is not the request's first
            tracked = self._tracker.new(request, None, now)
            self._dispatcher.hold(tracked, leader.family, now)
        else:
            tracked = self._tracker.new(request, deadline, now)
            tracked.family = Family(moved_at=now) if request.leader else None
            self._dispatcher.enqueue(tracked, now)
        self._attempts.waits(tracked, now)
        return tracked
