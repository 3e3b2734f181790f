"""A whole cluster in virtual time: the production objects, driven by an event heap instead of sockets. Pure.

Schedulers, workers, transfer, front and coordinator are the very objects that serve; only bytes, clocks and the
model are replaced (see virtual_model.py), and a step takes the time that `StepTime` says. A run is a function of
its seed: the same seed gives the same tokens at the same times.

Here are the clients, the coordinator with its front, and what a test does to any of them. `virtual_loop.py` drives a
worker, `virtual_network.py` carries what they say to each other, or does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from bench.virtual_clock import VirtualClock
from bench.virtual_loop import HEARTBEAT_S, VirtualLoop
from bench.virtual_network import COORDINATOR, Faults, Parcel, RandomFaults, VirtualNetwork
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.effects import Effect, ToFront, ToWorker
from common.front_messages import Admitted, CancelRequest, Rejected, RequestEnded, StopRequest, Submit
from common.messages import Message, Role, Sender, Tokens
from common.ordering import POLICIES, PolicyName
from common.request import (
    FrontId,
    Incarnation,
    Request,
    RequestId,
    TokenLogprobs,
    WorkerId,
    first_attempt_of_epoch,
)
from coordinator.cluster import Cluster
from coordinator.front import Front
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.targets import Targets

FRONT = FrontId("front")
NOTICED_AFTER_S = 0.05
"""From the end of a process to the coordinator's hearing of it, where it watches the process."""
COMES_BACK_AFTER_S = 3.0
"""From the end of a process to the first word of the one that goes on in its place, in the other role."""
_LOOKS_EVERY_S = 0.05


@dataclass(slots=True)
class Answer:
    """What a client got."""

    submitted: float
    group: tuple[RequestId, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    end: str | None = None  # finish reason, or the error's name, or "left"
    reason: str = ""  # of an error
    retry_after_s: float = 0.0


class VirtualCluster:
    def __init__(
        self,
        *,
        seed: int,
        num_prefill: int,
        num_decode: int,
        prefill_shape: Shape | None = None,
        decode_shape: Shape | None = None,
        step_time: StepTime | None = None,
        faults: Faults | None = None,
        max_queue: int = 100_000,
        targets: Mapping[str, Targets] | None = None,
        local_prefill: bool = False,
        refuse_late: bool = True,
        decode_step_time: StepTime | None = None,
        policy: PolicyName = "fair",
    ) -> None:
        self.clock = VirtualClock()
        self.random = Random(seed)
        self.network = VirtualNetwork(self.clock, RandomFaults(faults or Faults(), self.random))
        self.answers: dict[RequestId, Answer] = {}
        self._max_queue = max_queue
        self._order = policy
        self._targets = targets
        self._local_prefill = local_prefill
        self._refuse_late = refuse_late
        self._epoch = 0
        self._start_coordinator()
        self.network.join(COORDINATOR, self._receive)
        shapes = {
            "prefill": replace(prefill_shape or Shape(), policy=policy),
            "decode": replace(decode_shape or Shape(), policy=policy),
        }
        prefill_time = step_time or StepTime()
        times = {"prefill": prefill_time, "decode": decode_step_time or prefill_time}
        names: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(num_prefill)]
        names += [(f"decode-{i}", "decode") for i in range(num_decode)]
        self.workers = {
            WorkerId(name): self.make_worker(name, role, shapes[role], times[role]) for name, role in names
        }
        self.loops = {
            name: VirtualLoop(worker, self.clock, self.network, self._process_left)
            for name, worker in self.workers.items()
        }

    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> VirtualWorker:
        """To be overridden by a cluster whose workers compute something else."""
        return VirtualWorker(name, role, shape, step_time)

    # ------------------------------------------------------------ time, and chance

    @property
    def now(self) -> float:
        return self.clock.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        self.clock.at(time, action)

    def run(self, until: float) -> None:
        self.clock.run(until)

    @property
    def faults(self) -> Faults:
        """Chances of the network, where those decide."""
        assert isinstance(self.network.policy, RandomFaults)
        return self.network.policy.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self.network.policy = RandomFaults(faults, self.random)

    # ------------------------------------------------------------ clients

    def submit(self, request: Request, deadline_s: float | None = None) -> Answer:
        return self.submit_group([request], deadline_s)[0]

    def submit_group(self, requests: Sequence[Request], deadline_s: float | None = None) -> list[Answer]:
        """What one client asks for at once: an answer for each, and if one fails the others are cancelled."""
        group = tuple(request.request_id for request in requests)
        answers = [Answer(self.now, group) for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.answers[request.request_id] = answer
            if not self.coordinator_up:
                answer.end = "refused"
                continue
            self.front.open(request.request_id, request.scored_prompt_tokens)
        if self.coordinator_up:
            self._carry_out(self.cluster.submit(Submit(tuple(requests), deadline_s), self.now))
        return answers

    def leave(self, request_id: RequestId, end: str = "left") -> None:
        """The client goes away, and with it all that it asked for."""
        for other in self.answers[request_id].group:
            if self._close(other, end):
                self._carry_out(self.cluster.from_front(CancelRequest(other, "client left"), self.now))

    def stop(self, request_id: RequestId) -> None:
        """A stop string was found in it: the answer is complete."""
        if self._close(request_id, "stop"):
            self._carry_out(self.cluster.from_front(StopRequest(request_id), self.now))

    def _close(self, request_id: RequestId, end: str) -> bool:
        answer = self.answers[request_id]
        if answer.end is not None:
            return False
        answer.end = end
        self.front.close(request_id)
        return True

    @property
    def tokens_out(self) -> int:
        return sum(len(answer.ids) for answer in self.answers.values())

    # ------------------------------------------------------------ what happens to workers

    def kill(self, name: str, *, noticed: bool = False) -> None:
        """Its process is gone. `noticed`: the coordinator watches it, as it does on its own machine; else only the
        lack of heartbeats tells."""
        loop = self.loops[WorkerId(name)]
        loop.kill()
        if noticed:
            self._notice(loop.worker)

    def restart(self, name: str) -> None:
        self.loops[WorkerId(name)].start()

    def terminate(self, name: str, deadline_s: float = 30.0) -> None:
        """SIGTERM: it drains and leaves."""
        self.loops[WorkerId(name)].stop(deadline_s)

    def drain(self, name: str, deadline_s: float = 30.0) -> None:
        """`POST /admin/workers/{id}/drain`."""
        effects = self.cluster.departures.drain(WorkerId(name), deadline_s, self.now)
        assert effects is not None
        self._carry_out(effects)

    def set_role(self, name: str, role: Role, deadline_s: float = 30.0) -> None:
        """`POST /admin/workers/{id}/role`. Raises Conflict."""
        effects = self.cluster.departures.change_role(WorkerId(name), role, deadline_s, self.now)
        assert effects is not None
        self._carry_out(effects)

    def freeze(self, name: str) -> None:
        """SIGSTOP: it stands still; what is sent to it waits."""
        self.loops[WorkerId(name)].freeze()

    def thaw(self, name: str) -> None:
        self.loops[WorkerId(name)].thaw()

    def _process_left(self, worker: VirtualWorker) -> None:
        """By itself."""
        self._notice(worker)
        if self.loops[worker.name].changes_role:
            self.at(self.now + COMES_BACK_AFTER_S, lambda: self._comes_back(worker.name))

    def _comes_back(self, name: WorkerId) -> None:
        if self.loops[name].alive:  # somebody started it as it was
            return
        loop, worker = self.loops.pop(name), self.workers.pop(name)
        loop.start(other_role=True)
        self.loops[worker.name], self.workers[worker.name] = loop, worker

    def _notice(self, worker: VirtualWorker) -> None:
        name, life = worker.name, worker.incarnation
        self.at(self.now + NOTICED_AFTER_S, lambda: self._process_ended(name, life))

    def _process_ended(self, name: WorkerId, life: Incarnation) -> None:
        """The coordinator watches the processes of its own machine."""
        if self.coordinator_up:
            self._carry_out(self.cluster.worker_died(name, life, self.now))

    # ------------------------------------------------------------ what happens to the coordinator

    def _start_coordinator(self) -> None:
        self._epoch += 1
        self.front = Front()
        self.cluster = Cluster(
            Registry(
                tokenizer_hash=None, fronts={FRONT: "virtual://front"}, heartbeat_interval_s=HEARTBEAT_S
            ),
            WaitingQueue(max_requests=self._max_queue, max_tokens=1 << 40, policy=POLICIES[self._order]),
            first_attempt=first_attempt_of_epoch(self._epoch),
            targets=self._targets,
            local_prefill=self._local_prefill,
            refuse_late=self._refuse_late,
        )
        self.coordinator_up = True
        self._coordinator_timer = float("inf")

    def kill_coordinator(self) -> None:
        """Coordinator and front are one process: its requests are gone, the workers are not told."""
        self.coordinator_up = False
        for request_id, answer in self.answers.items():
            if answer.end is None:
                self._close(request_id, "coordinator lost")

    def start_coordinator(self) -> None:
        assert not self.coordinator_up
        self._start_coordinator()

    def restart_coordinator(self) -> None:
        self.kill_coordinator()
        self.start_coordinator()

    def terminate_coordinator(self, deadline_s: float = 30.0) -> None:
        """SIGTERM: it takes nothing new, lets what it has end within `deadline_s`, fails the rest, and goes."""
        self.cluster.draining = True
        self._leave_when_done(self._epoch, self.now + deadline_s)

    def _leave_when_done(self, epoch: int, until: float) -> None:
        if not self.coordinator_up or self._epoch != epoch:
            return
        if len(self.front) and self.now < until:
            self.at(min(until, self.now + _LOOKS_EVERY_S), lambda: self._leave_when_done(epoch, until))
            return
        for request_id, answer in self.answers.items():
            if answer.end is None:
                self.leave(request_id, "NoWorker")
        self.kill_coordinator()

    def check_idle(self) -> None:
        """Asserts that nothing is left of anything anywhere."""
        if self.coordinator_up:
            assert self.cluster.settled and len(self.front) == 0, "the coordinator holds something"
        for loop in self.loops.values():
            if loop.alive and not loop.frozen:
                loop.worker.check_idle()

    # ------------------------------------------------------------ the coordinator's process

    def _receive(self, parcel: Parcel, intact: bool) -> None:
        if not self.coordinator_up:
            return
        if isinstance(parcel.message, Tokens):
            self._at_front(parcel.message, parcel.sender)
        else:
            self._carry_out(self.cluster.from_worker(parcel.message, parcel.sender, self.now))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorker):
                me = Sender(COORDINATOR, Incarnation(self._epoch))
                self.network.send(Parcel(COORDINATOR, effect.worker, effect.message, me))
            elif isinstance(effect, ToFront):
                self._at_client(effect.message)
        deadline = self.cluster.next_deadline(self.now)
        if deadline is not None and (
            self._coordinator_timer > deadline or self._coordinator_timer <= self.now
        ):
            self._coordinator_timer = deadline + 0.01
            self.at(self._coordinator_timer, self._turn)

    def _turn(self) -> None:
        if self.coordinator_up and self.now >= self._coordinator_timer:
            self._coordinator_timer = float("inf")
            for gap in self.front.gaps(self.now):
                self._carry_out(self.cluster.from_front(gap, self.now))
            self._carry_out(self.cluster.turn(self.now))

    def _at_client(self, message: Message) -> None:
        """The coordinator's word to the front: same process, nothing is lost."""
        if isinstance(message, Rejected):
            for request_id in self.answers[message.id].group:
                self._close(request_id, message.error)
                self.answers[request_id].reason = message.reason
                self.answers[request_id].retry_after_s = message.retry_after_s
        elif isinstance(message, RequestEnded):
            self.answers[message.id].reason = message.reason
            self._close(message.id, message.error)
            self.leave(message.id, message.error)
        else:
            assert isinstance(message, Admitted)

    def _at_front(self, tokens: Tokens, sender: Sender) -> None:
        worker = WorkerId(sender.name)
        if self.cluster.registry.get(worker, sender.incarnation) is None:
            self.front.late_rows += len(tokens.rows) + len(tokens.prompts)
            return
        tokens, dropped, ends = self.cluster.hear_tokens(tokens, worker, self.now)
        self.front.late_rows += dropped
        self._carry_out(ends)
        deltas, heard = self.front.accept(tokens, sender.name, sender.incarnation, self.now)
        for delta in deltas:
            answer = self.answers[delta.id]
            assert answer.end is None, "a token after the end"
            answer.ids += delta.ids
            answer.prompt_logprobs += delta.prompt_logprobs
            if delta.logprobs is not None:
                answer.logprobs += delta.logprobs
            if delta.ids:
                answer.stamps.append(self.now)
            answer.end = delta.finish
        for message in heard:
            self._carry_out(self.cluster.from_front(message, self.now))
