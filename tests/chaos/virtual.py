"""Runs a cell of the plan in virtual time: brings a request to its phase, lets the fault fall, and looks at all that
must be true afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from zlib import crc32

from bench.virtual_cluster import Answer
from bench.virtual_network import COORDINATOR, LOST, Fate, Parcel
from common.lifecycle import Phase, is_end
from common.request import RequestId
from tests.chaos.plan import LASTS_S, LATE_S, SLOW_S, Cell, Fault, Outcome, Station
from tests.chaos.virtual_post import Order, has_end, is_about
from tests.chaos.virtual_scene import WATCHED, Scene, expected

IDLE_AFTER_S = 2.0
"""From the end of the last request, or of the fault where that is later, until nothing is left anywhere."""
HANGS_AFTER_S = 200.0
DISTURBED_S = 0.5
"""A token that takes so long has been held up: a step of a full batch with a chunk takes a tenth of a second."""
AWAY_S = 1.0
NEVER_COUNTED = ("internal_errors_total", "kv_checksum_failures_total", "workers_lost_total")
_LOOKS_EVERY_S = 0.01
_ROLES = {"P": "prefill", "D": "decode", "C": COORDINATOR}
_WHILE_THERE = (Station.PREFILLED, Station.DECODING, Station.PREEMPTED)
"""Messages are met from here on; in the others the phase begins with the message, so it is met when it first comes."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a cell; `wrong` says in words what should not have. `ended_at`: virtual time, in seconds."""

    cell: Cell
    outcome: str
    attempts: int
    ended_at: float
    wrong: tuple[str, ...]


def run_cell(cell: Cell, seed: int = 0) -> Result:
    run = _Run(cell, crc32(cell.name.encode()) + seed)
    wrong: list[str] = []
    try:
        run.scene.begin()
        run.meet_messages()
        run.scene.reach()
        run.fall()
        run.to_the_end()
        wrong += run.findings()
    except AssertionError as error:
        wrong.append(str(error) or repr(error))
    return Result(cell, run.outcome(WATCHED), run.attempts, run.ended_at, tuple(wrong))


class _Run:
    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.scene = Scene(cell.station, seed, 1 if cell.victim.startswith("only") else 2)
        self.cluster = self.scene.cluster
        self.heard_at_once = seed % 2 == 0  # the coordinator watches the process that is killed
        self.over_at = 0.0  # the fault's end
        self.order: Order | None = None
        self.lives = [self.cluster.cluster]  # coordinators, one after the other
        self.undisturbed: list[RequestId] = []
        self.fell_at = 0.0

    @property
    def attempts(self) -> int:
        timeline = self.lives[0].timeline(WATCHED, self.cluster.now)
        return 0 if timeline is None else timeline["attempts"]

    @property
    def ended_at(self) -> float:
        """When the client had the last token."""
        answer = self.cluster.answers.get(WATCHED)
        return 0.0 if answer is None else max(answer.stamps, default=0.0)

    # ------------------------------------------------------------ the fault

    def meet_messages(self) -> None:
        """For what is under way before the request stands where it should."""
        if self.cell.fault in (Fault.LOST, Fault.DOUBLED, Fault.LATE):
            kind, _, by = self.cell.victim.partition(" of ")
            while_there = self.cell.station in _WHILE_THERE or kind.startswith("Heartbeat")
            last = self.cell.station is Station.ENDED

            def fits(parcel: Parcel) -> bool:
                if parcel.kind != kind or not parcel.source.startswith(_ROLES[by]):
                    return False
                if while_there and not self.fell_at:
                    return False
                if kind == "HeartbeatAck":
                    return parcel.target in (self.scene.prefill, self.scene.decode)
                return has_end(parcel, WATCHED) if last else is_about(parcel, WATCHED)

            self.order = self.scene.post.meet(fits, _CHANGES[self.cell.fault])
        elif self.cell.fault is Fault.CORRUPTED:
            self.order = self.scene.post.meet(
                lambda parcel: parcel.kind == "Block" and is_about(parcel, WATCHED),
                lambda fate: replace(fate, corrupt=True),
            )

    def fall(self) -> None:
        cell, cluster, scene = self.cell, self.cluster, self.scene
        self.fell_at = self.over_at = cluster.now
        worker = scene.prefill if cell.victim.endswith("P") else scene.decode
        self.undisturbed = [name for name in scene.neighbours if not self._is_hit(name, worker)]
        match cell.fault:
            case Fault.LEAVES:
                cluster.leave(WATCHED)
            case Fault.LEAVES_UNHEARD:
                scene.post.meet(lambda p: p.kind == "Abort" and is_about(p, WATCHED), lambda fate: LOST, None)
                cluster.leave(WATCHED)
            case Fault.SIGTERM | Fault.SIGTERM_AT_ONCE:
                deadline_s = 30.0 if cell.fault is Fault.SIGTERM else 0.0
                if cell.victim == "C":
                    cluster.terminate_coordinator(deadline_s)
                else:
                    cluster.terminate(worker, deadline_s)
                    self._when_gone(worker, lambda: cluster.restart(worker))
            case Fault.SIGKILL if cell.victim == "C":
                cluster.kill_coordinator()
                self._after(AWAY_S, self._start_coordinator)
            case Fault.SIGKILL:
                cluster.kill(worker, noticed=self.heard_at_once)
                self._after(LASTS_S, lambda: cluster.restart(worker))
            case Fault.SIGKILL_TWICE:
                cluster.kill(worker, noticed=self.heard_at_once)
                self._kill_next(worker)
            case Fault.SIGKILL_FOR_GOOD:
                cluster.kill(worker, noticed=self.heard_at_once)
            case Fault.STOPS:
                cluster.freeze(worker)
                self._after(LASTS_S, lambda: cluster.thaw(worker))
            case Fault.CUT | Fault.CUT_FOR_GOOD | Fault.SLOW:
                self._link(*cell.victim.removeprefix("only ").split("-"))

    def _kill_next(self, first: str) -> None:
        """Whoever runs it next, as soon as it does; then both are replaced."""
        tracked = self.cluster.cluster.tracker.get(WATCHED)
        running = Phase.PREFILLING if self.cell.victim == "P" else Phase.DECODING
        if tracked is None or tracked.attempts < 2 or tracked.life.phase is not running:
            self._after(_LOOKS_EVERY_S, lambda: self._kill_next(first))
            return
        second = tracked.prefill if self.cell.victim == "P" else tracked.decode
        assert second is not None and second != first, "it went back to a dead worker"
        self.cluster.kill(second, noticed=True)
        for name in (first, second):
            self._after(LASTS_S, partial(self.cluster.restart, name))

    def _link(self, one: str, other: str) -> None:
        network = self.cluster.network
        parties = {"P": self.scene.prefill, "D": self.scene.decode, "C": COORDINATOR}
        ends = parties[one], parties[other]
        if self.cell.fault is Fault.SLOW:
            network.slow(*ends, SLOW_S)
        elif self.heard_at_once or self.cell.fault is Fault.CUT_FOR_GOOD:
            network.cut(*ends)
        else:
            network.stall(*ends)
        if self.cell.fault is not Fault.CUT_FOR_GOOD:
            self._after(LASTS_S, lambda: network.restore(*ends))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.over_at = self.cluster.now + seconds
        self.cluster.at(self.over_at, action)

    def _when_gone(self, worker: str, action: Callable[[], None]) -> None:
        """A worker that drains is replaced when it has left."""
        if self.scene.loop(worker).alive:
            self.cluster.at(self.cluster.now + 0.1, lambda: self._when_gone(worker, action))
        else:
            self._after(AWAY_S, action)

    def _start_coordinator(self) -> None:
        self.cluster.start_coordinator()
        self.lives.append(self.cluster.cluster)

    def _is_hit(self, name: RequestId, worker: str) -> bool:
        """Whether the fault may hold it up: it runs at the victim, or at the end of a link that is the victim."""
        tracked = self.cluster.cluster.tracker.get(name)
        if self.cell.fault is Fault.SIGKILL_TWICE:
            return True
        if self.cell.victim == "C" or tracked is None or tracked.life.phase is not Phase.DECODING:
            return True
        return tracked.decode == (self.scene.decode if "D" in self.cell.victim else worker)

    # ------------------------------------------------------------ afterwards

    def to_the_end(self) -> None:
        cluster = self.cluster
        limit = cluster.now + HANGS_AFTER_S
        while cluster.now <= self.over_at or any(answer.end is None for answer in cluster.answers.values()):
            open_ids = [name for name, answer in cluster.answers.items() if answer.end is None]
            assert cluster.now < limit, f"{', '.join(open_ids)} did not end"
            cluster.run(until=cluster.now + 0.25)
        if self.cell.victim == "C":
            self._ask_a_new_one()
        cluster.run(until=cluster.now + IDLE_AFTER_S)

    def _ask_a_new_one(self) -> None:
        """A coordinator that has left refuses; the next one serves as soon as it knows its workers."""
        cluster = self.cluster
        if self.cell.fault is not Fault.SIGKILL:
            cluster.run(until=cluster.now + 0.25)
            assert not cluster.coordinator_up, "it did not leave"
            self._start_coordinator()
        cluster.run(until=cluster.now + 3.0)
        (answer,) = self.scene.ask("new", 50, 20)
        cluster.run(until=cluster.now + 5.0)
        assert answer.end in ("length", "stop"), f"a new request: {answer.end}"

    def outcome(self, request_id: RequestId) -> str:
        request = next((one for one in self.scene.requests if one.request_id == request_id), None)
        if request is None:
            return "not asked"
        answer, right = self.cluster.answers[request_id], expected(request)
        if answer.ids != right[: len(answer.ids)]:
            return "wrong tokens"
        if answer.end in ("length", "stop"):
            return _outcome_of_finished(answer, right)
        kinds: dict[str | None, Outcome] = {"left": "left", "coordinator lost": "broken"}
        return kinds.get(answer.end, f"error:{answer.end}")

    def findings(self) -> Iterator[str]:
        cell = self.cell
        for request in self.scene.requests:
            outcome = self.outcome(request.request_id)
            stated: tuple[str, ...] = cell.outcomes
            if not request.request_id.startswith(WATCHED):
                stated = ("exact", *self._others_may())
            elif request.request_id != WATCHED:
                stated += _OF_OTHERS.get(cell.fault, ())
            if outcome not in stated:
                answer = self.cluster.answers[request.request_id]
                yield f"{request.request_id}: {outcome}, not {' or '.join(stated)} {answer.reason}"
        if self.order is not None and self.order.met != 1:
            yield "the message never came: the cell proves nothing"
        yield from self._timeline_findings()
        yield from self._counter_findings()
        yield from self._witness_findings()
        try:
            self.cluster.check_idle()
        except AssertionError as error:
            yield f"{IDLE_AFTER_S:g} s later {error}"

    def _others_may(self) -> tuple[str, ...]:
        """They have the same coordinator, and the same decode worker where there is only one."""
        return tuple(one for one in self.cell.outcomes if one != "left") + _OF_OTHERS.get(self.cell.fault, ())

    def _timeline_findings(self) -> Iterator[str]:
        if "broken" in self.cell.outcomes:
            return  # its coordinator is gone, and with it what it remembered
        for request in self.scene.requests:
            if request.request_id == "new":
                continue
            answer = self.cluster.answers[request.request_id]
            timeline = self.lives[0].timeline(request.request_id, self.cluster.now)
            if timeline is None or not is_end(Phase(timeline["phase"])):
                yield f"{request.request_id} has not one end: {timeline}"
            elif (timeline["phase"] == Phase.FINISHED) != (answer.end in ("length", "stop")):
                yield f"{request.request_id} is {timeline['phase']}, its client {answer.end}"
            elif timeline["output_tokens"] != len(answer.ids):
                yield f"{request.request_id}: counted {timeline['output_tokens']}, said {len(answer.ids)}"
        migrated = self.attempts > 1
        if self.cell.migrates is not None and migrated != self.cell.migrates:
            timeline = self.lives[0].timeline(WATCHED, self.cluster.now)
            yield f"{self.attempts} attempts: {None if timeline is None else timeline['last_fault']}"

    def _counter_findings(self) -> Iterator[str]:
        counted = self.counted()
        for name in self.cell.counts:
            if not any(value > 0 for one, value in counted.items() if one.startswith(name)):
                yield f"{name} does not tell"
        for name in NEVER_COUNTED:
            if not any(one.startswith(name) for one in self.cell.counts) and any(
                value > 0 for one, value in counted.items() if one.startswith(name)
            ):
                yield f"{name} has risen"

    def counted(self) -> dict[str, float]:
        """Of the coordinators and of the workers' present lives."""
        total: dict[str, float] = {}
        nodes = [loop.worker.node for loop in self.cluster.loops.values()]
        for counters in (*(one.counters for one in self.lives), *(node.records.counters for node in nodes)):
            for name, value in counters.values.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _witness_findings(self) -> Iterator[str]:
        if self.scene.tight:
            return  # neighbours there wait for blocks, and that is as it should be
        for name in self.undisturbed:
            stamps = self.cluster.answers[name].stamps
            during = [time for time in stamps if time >= self.fell_at - DISTURBED_S]
            gap_s = max((b - a for a, b in pairwise(during)), default=0.0)
            if gap_s > DISTURBED_S:
                yield f"{name} was held up for {gap_s:.2f} s"


def _outcome_of_finished(answer: Answer, right: list[int]) -> str:
    return "exact" if answer.ids == right else f"{len(answer.ids)} of {len(right)} tokens"


_OF_OTHERS = {
    Fault.SIGKILL_TWICE: ("error:RequestFailed",),
    Fault.SIGKILL_FOR_GOOD: ("error:RequestFailed", "error:DeadlinePassed"),
}


def _double(fate: Fate) -> Fate:
    return replace(fate, delays_s=(*fate.delays_s, fate.delays_s[0] + LATE_S))


_CHANGES: dict[Fault, Callable[[Fate], Fate]] = {
    Fault.LOST: lambda fate: LOST,
    Fault.DOUBLED: _double,
    Fault.LATE: lambda fate: replace(fate, delays_s=(fate.delays_s[0] + LATE_S,)),
}
