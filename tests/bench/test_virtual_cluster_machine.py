"""The whole cluster under a state machine, in virtual time, over the objects that serve.

Clients come and leave, workers die, stand still, drain and come back, links are cut, the coordinator restarts, and
messages of any kind are lost, come twice, late, or when they are let go. Every token is right always; in the end
everything flows again, and then every request has ended once, nothing is held anywhere, and a fresh one goes through.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.virtual_cluster import FRONT, VirtualCluster
from bench.virtual_model import continuation
from bench.virtual_network import COORDINATOR, HELD, LOST, Fate, Parcel
from bench.virtual_worker import Shape, StepTime
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids
from tests.machines import SHRINKING_TAKES, histories

pytestmark = SHRINKING_TAKES

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SHAPE = Shape(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64)
SLOW = StepTime(base_s=0.03)
ENDS_WITHIN_S = 160.0  # `max_wait_s` in the queue, and some attempts
SETTLES_S = 4.0  # far below the limits of both sides of a transfer: reconciliation clears, not a timeout

KINDS = (
    "Register", "Registered", "Heartbeat", "HeartbeatAck", "Prefill", "Decode", "Accepted", "Later", "Refused",
    "Started", "Ended", "Abort", "Stop", "Rebind", "Drain", "Offer", "Accept", "Block", "Credit", "Nack", "Handover",
    "Delivered", "Revoke", "Cancel", "Cancelled", "Tokens",
)  # fmt: skip
FATES = (LOST, HELD, Fate((0.001, 0.3)), Fate((0.001, 8.0)), Fate((1.5,)))
DAMAGED = Fate((0.001, 0.002), corrupt=True)
FAIR = Fate((0.0005,))
names = st.sampled_from(NAMES)
outs = st.sampled_from((1, 3, 30, 100, 100))
spans = st.sampled_from((0.002, 0.03, 0.1, 0.4, 1.1, 4.0))
parties = st.sampled_from((COORDINATOR, *NAMES))
spoilings = st.one_of(
    st.dictionaries(st.sampled_from(KINDS), st.sampled_from(FATES), max_size=6), st.just({"Block": DAMAGED})
)


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = VirtualCluster(
            seed=0, num_prefill=2, num_decode=2, prefill_shape=SHAPE, decode_shape=SHAPE, step_time=SLOW
        )
        self.spoiled: dict[str, tuple[Fate, int]] = {}  # what the next messages of a kind meet
        self.cluster.network.policy = self._fate
        self.cuts: set[tuple[str, str]] = set()
        self.asked: dict[RequestId, tuple[list[int], int]] = {}
        self.cluster.run(until=1.0)

    def _fate(self, parcel: Parcel) -> Fate:
        fate, left = self.spoiled.get(parcel.kind, (FAIR, 0))
        if left > 0:
            self.spoiled[parcel.kind] = (fate, left - 1)
            return fate
        return FAIR

    # ------------------------------------------------------------ clients

    @initialize(asked=st.lists(outs, min_size=1, max_size=5), spoiled=spoilings, seconds=spans)
    def begin(self, asked: list[int], spoiled: dict[str, Fate], seconds: float) -> None:
        """All histories begin with requests on their way, most with messages that do not get there as they should."""
        self.messages_are_spoiled(spoiled, 3, 0.0)
        for out in asked:
            self.submit(200, out, False)
        self.time_passes(seconds)

    @rule(length=st.sampled_from((1, 17, 64, 200, 500)), out=outs, like=st.booleans())
    def submit(self, length: int, out: int, like: bool) -> None:
        """`like`: its prompt begins as others do."""
        number = len(self.asked)
        prompt = [5] * length if like else [number * 7 + 11 * index for index in range(length)]
        request_id = RequestId(f"r{number}")
        self.asked[request_id] = (prompt, out)
        self.cluster.submit(Request(request_id, pack_ids(prompt), SamplingParams(out), FRONT))

    @precondition(lambda self: len(self.cluster.front) > 0)
    @rule(which=st.integers(0, 9), stops=st.booleans())
    def client_leaves_or_has_enough(self, which: int, stops: bool) -> None:
        open_now = [request_id for request_id, a in self.cluster.answers.items() if a.end is None]
        request_id = open_now[which % len(open_now)]
        if stops:
            self.cluster.stop(request_id)
        else:
            self.cluster.leave(request_id)

    # ------------------------------------------------------------ processes

    @rule(
        name=names, what=st.sampled_from(("dies", "is seen to die", "stands still", "restarts", "is to go"))
    )
    def process(self, name: str, what: str) -> None:
        loop = self.cluster.loops[WorkerId(name)]
        match what:
            case "stands still":
                self.cluster.freeze(name)
            case "restarts":
                self.cluster.restart(name)
            case "is to go" if loop.alive and not loop.frozen:
                self.cluster.terminate(name, 2.0)
            case "dies" | "is seen to die":
                self.cluster.kill(name, noticed=what == "is seen to die")

    @rule(name=names)
    def process_goes_on(self, name: str) -> None:
        if self.cluster.loops[WorkerId(name)].frozen:
            self.cluster.thaw(name)

    @precondition(lambda self: len(self.asked) > 3)
    @rule()
    def coordinator_restarts(self) -> None:
        self.cluster.restart_coordinator()

    # ------------------------------------------------------------ network and time

    @rule(spoiled=spoilings, count=st.sampled_from((1, 3, 20)), seconds=spans)
    def messages_are_spoiled(self, spoiled: dict[str, Fate], count: int, seconds: float) -> None:
        """The next ones of each kind."""
        self.spoiled.update({kind: (fate, count) for kind, fate in spoiled.items()})
        self.time_passes(seconds)

    @rule()
    def what_was_held_arrives(self) -> None:
        self.cluster.network.let_go()

    @rule(one=parties, other=parties, stalled=st.booleans())
    def link_is_cut(self, one: str, other: str, stalled: bool) -> None:
        if one != other:
            self.cuts.add((one, other))
            (self.cluster.network.stall if stalled else self.cluster.network.cut)(one, other)

    @rule()
    def links_are_restored(self) -> None:
        for one, other in sorted(self.cuts):
            self.cluster.network.restore(one, other)
        self.cuts.clear()

    @rule(seconds=spans)
    def time_passes(self, seconds: float) -> None:
        self.cluster.run(until=self.cluster.now + seconds)

    # ------------------------------------------------------------ what holds always, and in the end

    @invariant()
    def tokens_are_right(self) -> None:
        for request_id, (prompt, out) in self.asked.items():
            answer = self.cluster.answers[request_id]
            assert answer.ids == continuation(prompt, out)[: len(answer.ids)]
            assert answer.end != "length" or len(answer.ids) == out

    @invariant()
    def pools_add_up(self) -> None:
        for worker in self.cluster.workers.values():
            worker.pool.check()

    def teardown(self) -> None:
        cluster = self.cluster
        self.spoiled.clear()
        self.links_are_restored()
        cluster.network.let_go()
        for name in NAMES:
            loop = cluster.loops[WorkerId(name)]
            self.process_goes_on(name)
            if not loop.alive or loop.worker.node.draining:
                cluster.restart(name)
        until = cluster.now + ENDS_WITHIN_S
        while len(cluster.front) and cluster.now < until:
            cluster.run(until=cluster.now + 1.0)
            self.tokens_are_right()
        assert not len(cluster.front), (
            f"never end: {[r for r, a in cluster.answers.items() if a.end is None]}"
        )
        cluster.run(until=cluster.now + SETTLES_S)
        cluster.check_idle()
        self.submit(200, 30, False)
        cluster.run(until=cluster.now + 5.0)
        answers = list(cluster.answers.values())
        assert answers[-1].end == "length", "nothing goes through any more"


ClusterMachine.TestCase.settings = histories(50, steps=40)
TestVirtualCluster = ClusterMachine.TestCase
