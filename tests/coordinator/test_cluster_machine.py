"""Coordinator and front under a state machine: whatever workers, clients and the network do, in any order.

Workers are honest (`scripted_workers.py`) and may die, fall silent, come back, drain, refuse, give up and forget;
every message between them and the coordinator, and every token, is lost, doubled, delayed and reordered at will. Each
request has one end, each token comes once and in its place, attempts only rise. In the end everything flows again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.effects import Effect, ToFront, ToWorker
from common.front_messages import Admitted, CancelRequest, Rejected, RequestEnded, StopRequest, Submit
from common.lifecycle import Phase
from common.messages import (
    Accepted,
    Decode,
    Ended,
    Later,
    Message,
    Prefill,
    Rebind,
    Refused,
    Role,
    Sender,
    Started,
    Tokens,
)
from common.request import (
    Attempt,
    Incarnation,
    Key,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    first_attempt_of_epoch,
    pack_ids,
    unpack_ids,
)
from coordinator.cluster import Cluster
from coordinator.errors_http import Conflict
from coordinator.front import Front
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from tests.coordinator.cluster_bench import FRONT
from tests.coordinator.scripted_workers import ScriptedWorker, token_of
from tests.machines import SHRINKING_TAKES, UnderWay, histories

pytestmark = SHRINKING_TAKES

NAMES = ("p0", "p1", "d0", "d1")
FATES = ("dies", "is seen to die", "goes on", "restarts", "is to drain", "is to change its role")
QUEUE = 8
ENDS_WITHIN_S = 150.0  # `max_wait_s`, and what an honest attempt takes
REGISTERS_WITHIN_S = 2.0
names = st.sampled_from(NAMES)
some = st.integers(0, 30)


@dataclass
class Answer:
    request: Request
    group: tuple[RequestId, ...]
    ids: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass(frozen=True)
class Told:
    """To one life of a worker: the next life has another socket."""

    worker: str
    incarnation: Incarnation | None


Carried = tuple[Sender | Told, Message]
"""What a worker said, and who; or what it is told."""


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 0
        self.answers: dict[RequestId, Answer] = {}
        self.under_way: UnderWay[Carried] = UnderWay()
        self.workers = {name: ScriptedWorker(name) for name in NAMES}
        self.given: dict[Key, tuple[str, bytes]] = {}  # to whom each attempt was dispatched, from what
        self.highest = Attempt(0)
        self._start_coordinator()
        for worker in self.workers.values():
            self._say(worker, worker.card())
        self.all_arrives()

    def _start_coordinator(self) -> None:
        self.epoch += 1
        self.front = Front()
        self.cluster = Cluster(
            Registry(tokenizer_hash="t", fronts={FRONT: "f"}),
            WaitingQueue(max_requests=QUEUE, max_tokens=1000),
            first_attempt=first_attempt_of_epoch(self.epoch),
        )

    # ------------------------------------------------------------ clients

    @initialize(outs=st.lists(st.sampled_from((1, 5, 20)), max_size=3), rounds=st.integers(0, 3))
    def begin(self, outs: list[int], rounds: int) -> None:
        """Most histories begin with requests on their way."""
        for out in outs:
            self.submit(1, 60, out, None, 0)
        for _ in range(rounds):
            self._workers_go_on()

    @rule(
        choices=st.sampled_from((1, 1, 1, 3)),
        tokens=st.sampled_from((1, 20, 60, 150, 230)),
        out=st.sampled_from((1, 2, 5, 20)),
        deadline_s=st.sampled_from((None, None, 2.0)),
        priority=st.integers(0, 1),
    )
    def submit(self, choices: int, tokens: int, out: int, deadline_s: float | None, priority: int) -> None:
        first = len(self.answers)
        group = tuple(RequestId(f"r{first + n}") for n in range(choices))
        leader = group[0] if choices > 1 else ""
        for child, request_id in enumerate(group):
            sampling = SamplingParams(max_tokens=out, child=child)
            wanted = Request(
                request_id, pack_ids(range(tokens)), sampling, FRONT, priority=priority, leader=leader
            )
            self.answers[request_id] = Answer(wanted, group)
            self.front.open(request_id)
        requests = tuple(self.answers[request_id].request for request_id in group)
        self._carry(self.cluster.submit(Submit(requests, deadline_s), self.now))

    @precondition(lambda self: len(self.front) > 0)
    @rule(which=some, stops=st.booleans())
    def client_leaves_or_has_enough(self, which: int, stops: bool) -> None:
        """It leaves with all that it asked for at once; a stop string ends one choice."""
        request_id = self._open_one(which)
        if stops:
            self._end(request_id, "stop")
            self.front.close(request_id)
            self._carry(self.cluster.from_front(StopRequest(request_id), self.now))
        else:
            self._leave(request_id, "left")

    def _leave(self, request_id: RequestId, end: str) -> None:
        for other in self.answers[request_id].group:
            if self.answers[other].end is None:
                self._end(other, end)
                self.front.close(other)
                self._carry(self.cluster.from_front(CancelRequest(other, "client left"), self.now))

    def _open_one(self, which: int) -> RequestId:
        open_now = [request_id for request_id, answer in self.answers.items() if answer.end is None]
        return open_now[which % len(open_now)]

    # ------------------------------------------------------------ workers

    @precondition(lambda self: self._held())
    @rule(which=some, steps=st.integers(1, 4))
    def worker_goes_on(self, which: int, steps: int) -> None:
        worker, key = self._held_one(which)
        for _ in range(steps):
            self._go_on(worker, key)

    def _go_on(self, worker: ScriptedWorker, key: Key) -> None:
        if worker.alive and key in worker.held:
            for sayer, message in worker.go_on(key, self.workers):
                self._say(sayer, message)

    def _held(self) -> list[tuple[ScriptedWorker, Key]]:
        return [(worker, key) for worker in self.workers.values() for key in worker.held]

    def _held_one(self, which: int) -> tuple[ScriptedWorker, Key]:
        held = self._held()
        return held[which % len(held)]

    @rule(name=names)
    def worker_beats(self, name: str) -> None:
        if self.workers[name].alive:
            self._say(self.workers[name], self.workers[name].beat())

    @precondition(lambda self: self._held())
    @rule(which=some, retryable=st.booleans())
    def worker_gives_up(self, which: int, retryable: bool) -> None:
        worker, key = self._held_one(which)
        for message in worker.end(key, "failed", retryable=retryable):
            self._say(worker, message)

    @precondition(lambda self: self._held())
    @rule(which=some)
    def worker_forgets(self, which: int) -> None:
        worker, key = self._held_one(which)
        del worker.held[key]
        for other in self.workers.values():  # who waits for its KV hears no more of it, and gives up
            if key in other.held and other.held[key].transfer:
                for message in other.end(key, "failed"):
                    self._say(other, message)

    @rule(name=names, what=st.sampled_from(FATES))
    def worker(self, name: str, what: str) -> None:
        """One that dies unseen may only have been silent: it goes on."""
        worker = self.workers[name]
        match what:
            case "dies":
                worker.alive = False
            case "is seen to die":
                worker.alive = False
                life = Incarnation(worker.incarnation)
                self._carry(self.cluster.worker_died(WorkerId(name), life, self.now))
            case "goes on":
                worker.alive = True
            case "restarts":
                self._restart(worker)
            case "is to drain":
                with suppress(Conflict):
                    self._carry(self.cluster.departures.drain(WorkerId(name), 10.0, self.now) or [])
            case "is to change its role":
                other: Role = "decode" if name.startswith("p") else "prefill"
                with suppress(Conflict):
                    self._carry(
                        self.cluster.departures.change_role(WorkerId(name), other, 10.0, self.now) or []
                    )

    def _restart(self, worker: ScriptedWorker) -> None:
        worker.restart()
        self._say(worker, worker.card())

    @precondition(lambda self: self.given)
    @rule(name=names, which=some, word=st.integers(0, 8), other=names)
    def worker_says_what_nobody_asked(self, name: str, which: int, word: int, other: str) -> None:
        """A late copy of anything, or nonsense."""
        key = list(self.given)[-1 - which % len(self.given)]
        words: tuple[Message, ...] = (
            Accepted(*key, self.workers[other].address),
            Accepted(*key),
            Later(*key, 0.5),
            Refused(*key, "no"),
            Started(*key, "prefilling"),
            Started(*key, "decode_ready"),
            Ended(*key, outcome="handed_over"),
            Ended(*key, outcome="finished"),
            Ended(*key, outcome="unknown"),
        )
        self._say(self.workers[name], words[word])

    # ------------------------------------------------------------ network, time, the coordinator itself

    @precondition(lambda self: self.under_way)
    @rule(which=some, fate=st.sampled_from(("arrives", "arrives", "comes again later", "is lost")))
    def one_message(self, which: int, fate: str) -> None:
        if fate == "is lost":
            self.under_way.lose(which)
        else:
            self._arrive(self.under_way.take(which) if fate == "arrives" else self.under_way.copy(which))

    @precondition(lambda self: self.under_way)
    @rule()
    def all_arrives(self) -> None:
        for _ in range(len(self.under_way)):
            self._arrive(self.under_way.take(0))

    @rule(seconds=st.sampled_from((0.1, 0.6, 1.1, 2.6, 4.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._turn()

    @precondition(lambda self: len(self.answers) > 2 * self.epoch)
    @rule()
    def coordinator_restarts(self) -> None:
        """It and the front are one process: its clients are gone, the workers are not told."""
        for request_id, answer in self.answers.items():
            if answer.end is None:
                self._end(request_id, "coordinator lost")
        self._start_coordinator()

    # ------------------------------------------------------------ inside

    def _say(self, worker: ScriptedWorker, message: Message) -> None:
        self.under_way.put((worker.sender, message))

    def _arrive(self, carried: Carried) -> None:
        who, message = carried
        if isinstance(who, Told):
            worker = self.workers[who.worker]
            if worker.alive and who.incarnation in (None, worker.incarnation):
                for said in worker.hear(message):
                    self._say(worker, said)
        elif isinstance(message, Tokens):
            self._at_front(message, who)
        else:
            self._carry(self.cluster.from_worker(message, who, self.now))

    def _turn(self) -> None:
        for gap in self.front.gaps(self.now):
            self._carry(self.cluster.from_front(gap, self.now))
        self._carry(self.cluster.turn(self.now))

    def _carry(self, effects: list[Effect]) -> None:
        """Whoever leaves because of one of them does so when all are carried out, as a client does."""
        ended: list[RequestEnded] = []
        for effect in effects:
            if isinstance(effect, ToWorker):
                if isinstance(effect.message, (Prefill, Decode)):
                    self._check_dispatch(effect.worker, effect.message)
                if isinstance(effect.message, Rebind):
                    assert effect.message.key in self.given, "a new target for what was never given"
                registered = self.cluster.registry.get(effect.worker)
                life = None if registered is None else registered.incarnation
                self.under_way.put((Told(str(effect.worker), life), effect.message))
            elif isinstance(effect, ToFront):
                self._at_client(effect.message)
                if isinstance(effect.message, RequestEnded):
                    ended.append(effect.message)
        for message in ended:
            self._leave(message.id, message.error)

    def _at_client(self, message: Message) -> None:
        if isinstance(message, Rejected):
            for request_id in self.answers[message.id].group:
                self._end(request_id, message.error)
                self.front.close(request_id)
        elif isinstance(message, RequestEnded):
            self._end(message.id, message.error)
            self.front.close(message.id)
        else:
            assert isinstance(message, Admitted)

    def _at_front(self, tokens: Tokens, sender: Sender) -> None:
        deltas, heard = self.front.accept(tokens, sender.name, sender.incarnation, self.now)
        for delta in deltas:
            answer = self.answers[delta.id]
            assert answer.end is None, "a token after the end"
            answer.ids += delta.ids
            if delta.finish is not None:
                self._end(delta.id, delta.finish)
        for message in heard:
            self._carry(self.cluster.from_front(message, self.now))

    def _end(self, request_id: RequestId, end: str) -> None:
        answer = self.answers[request_id]
        assert answer.end is None, f"{request_id} ends as {end} and as {answer.end}"
        answer.end = end

    def _check_dispatch(self, worker: WorkerId, command: Prefill | Decode) -> None:
        """An attempt is one worker's for ever, from what the front had then; a new one is above all before it."""
        key, answer = command.key, self.answers[command.id]
        if key in self.given:
            assert self.given[key] == (worker, command.output_ids)
            return
        assert key[1] > self.highest, "attempts rise"
        self.highest = key[1]
        self.given[key] = (worker, command.output_ids)
        assert unpack_ids(command.output_ids) == answer.ids, "it starts from what the client has"
        registered = self.cluster.registry.get(worker)
        assert registered is not None and not registered.lost and not registered.draining

    # ------------------------------------------------------------ what holds always

    @invariant()
    def tokens_come_once_and_in_their_place(self) -> None:
        for request_id, answer in self.answers.items():
            assert answer.ids == [token_of(request_id, index) for index in range(len(answer.ids))]
            if answer.end == "length":
                assert len(answer.ids) == answer.request.sampling.max_tokens

    @invariant()
    def what_is_open_is_tracked(self) -> None:
        open_now = {request_id for request_id, answer in self.answers.items() if answer.end is None}
        tracker = self.cluster.tracker
        assert {tracked.id for tracked in tracker.all()} == open_now == set(self.front._streams)
        waiting = [tracked for tracked in tracker.all() if tracked.life.phase is Phase.WAITING]
        assert len(self.cluster.queue) == len(waiting)
        for tracked in tracker.all():
            assert tracked.outputs == self.answers[tracked.id].ids
            assert (tracked.life.phase is Phase.WAITING) == (tracked.attempt == 0) == (not tracked.holders)

    @invariant()
    def nobody_takes_room_for_nothing(self) -> None:
        """What is counted of workers is of requests that are with them; a lost one holds nothing that goes on."""
        router, registry = self.cluster._dispatcher._router, self.cluster.registry
        holders = {(t.id, worker) for t in self.cluster.tracker.dispatched() for worker in t.holders}
        for worker, prompts in router._prompts.items():
            assert {(request_id, worker) for request_id in prompts._by_request} <= holders
            assert prompts.tokens == sum(share.tokens for share in prompts._by_request.values())
        for worker, rows in router._rows.items():
            assert {(request_id, worker) for request_id in rows._by_request} <= holders
            assert rows.blocks == sum(share.blocks for share in rows._by_request.values())
            assert rows.context == sum(share.context for share in rows._by_request.values())
        for tracked in self.cluster.tracker.dispatched():
            needed = tracked.decode if tracked.handed_over else tracked.holders[0]
            assert needed is not None
            registered = registry.get(needed)
            assert registered is not None and not registered.lost, "it waits for one who is lost"

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        for name, worker in self.workers.items():
            if not worker.alive or worker.draining or name in self._draining():
                self._restart(worker)
        self._let_all_flow(ENDS_WITHIN_S)
        assert not len(self.front) and self.cluster.settled, "something never ends"
        for worker in self.workers.values():
            assert not worker.held, f"{worker.name} holds {list(worker.held)} for nobody"
        fresh = len(self.answers)
        self.submit(3, 60, 5, None, 0)
        self._let_all_flow(10.0)
        ends = [self.answers[RequestId(f"r{fresh + n}")].end for n in range(3)]
        assert ends == ["length"] * 3, "nothing goes through any more"

    def _draining(self) -> list[str]:
        return [str(worker.id) for worker in self.cluster.registry.all() if worker.draining]

    def _workers_go_on(self) -> None:
        """What is under way arrives, and everybody does a step of all that it holds."""
        self.all_arrives()
        for worker, key in self._held():
            self._go_on(worker, key)

    def _let_all_flow(self, within_s: float) -> None:
        begins = self.now
        while self.now < begins + within_s:
            for name, worker in self.workers.items():
                if worker.draining and not worker.held:
                    self._restart(worker)  # it has left as it was told to
                self.worker_beats(name)
            for _ in range(40):
                self._workers_go_on()
                if not len(self.under_way):
                    break
            self.tokens_come_once_and_in_their_place()
            self.what_is_open_is_tracked()
            busy = len(self.front) or any(worker.held for worker in self.workers.values())
            if not busy and self.now >= begins + REGISTERS_WITHIN_S:
                return
            self.now += 0.5
            self._turn()


ClusterMachine.TestCase.settings = histories(120, steps=70)
TestCluster = ClusterMachine.TestCase
