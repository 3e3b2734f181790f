"""The virtual cluster for a story: a network whose messages one by one can be lost or late, and looks at every pool.

`fate` is asked when a message or a block is sent: seconds that it comes late, None loses it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_model import VOCABULARY, continuation
from bench.virtual_network import LOST, Fate, Parcel
from bench.virtual_worker import Shape, StepTime
from common.blocks import BlockPool
from common.counters import Counters
from common.messages import Message
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids
from decode_node.worker import DecodeWorker

LateS = Callable[[Message], float | None]
SMALL_STEPS = StepTime(0.004, 0.0002, 0.0002)
LIMIT_S = 60.0


def in_time(_: Message) -> float | None:
    return 0.0


class StoryCluster(VirtualCluster):
    """Ready to serve when made. `delay_s`: between which times whatever is not late arrives."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        prefill_shape: Shape | None = None,
        decode_shape: Shape | None = None,
        delay_s: tuple[float, float] = (0.0001, 0.0005),
    ) -> None:
        self.fate: LateS = in_time
        self.delay_s = delay_s
        self.seen: list[Message] = []  # all that was sent
        super().__init__(
            seed=0,
            num_prefill=prefill,
            num_decode=decode,
            prefill_shape=prefill_shape,
            decode_shape=decode_shape,
            step_time=SMALL_STEPS,
        )
        self.network.policy = self._policy
        self.run(until=1.0)
        self.seen.clear()

    # ------------------------------------------------------------ what happens

    def ask(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Answer:
        sampling = SamplingParams(max_tokens, **fields)
        return self.submit(Request(RequestId(name), pack_ids(prompt), sampling, FRONT))

    def go(self, seconds: float) -> None:
        self.run(until=self.now + seconds)

    def until(self, done: Callable[[], bool]) -> None:
        """Event by event: stops at the very first one after which it is so."""
        limit = self.now + LIMIT_S
        while not done():
            assert self.clock.step(limit), "it does not come to that"

    def until_over(self, *answers: Answer) -> None:
        self.until(lambda: all(answer.end is not None for answer in answers))

    def settle(self, seconds: float = 4.0) -> None:
        """A cancellation is said three times to a worker that is dead."""
        self.go(seconds)
        self.check_idle()

    # ------------------------------------------------------------ what there is to see

    def pool(self, name: str) -> BlockPool:
        return self.workers[WorkerId(name)].pool

    def decode_node(self, name: str = "decode-0") -> DecodeWorker:
        node = self.workers[WorkerId(name)].node
        assert isinstance(node, DecodeWorker)
        return node

    def is_computing(self, name: str) -> bool:
        """A step of its is out."""
        return bool(self.loops[WorkerId(name)].batches)

    def phase_at(self, worker: str, request: str) -> str | None:
        """What the worker says of it, None where it holds nothing of it."""
        live = self.workers[WorkerId(worker)].node.heartbeat(0.0).live
        return next((phase for name, _, phase in live if name == request), None)

    def phase(self, request: str) -> str:
        """The coordinator's view."""
        timeline = self.cluster.timeline(RequestId(request), self.now)
        assert timeline is not None
        return str(timeline["phase"])

    def held(self) -> dict[str, int]:
        """Blocks that somebody holds, by worker; whole books at each."""
        for worker in self.workers.values():
            worker.pool.check()
        return {
            str(w.name): w.pool.held
            for w in self.workers.values()
            if self.loops[w.name].alive and w.pool.held
        }

    def all_counters(self) -> list[Counters]:
        return [self.cluster.counters, *(w.node.records.counters for w in self.workers.values())]

    def counted(self, name: str) -> float:
        """Of one counter, over all labels, everywhere."""
        return sum(counters.total(name) for counters in self.all_counters())

    def workers_counter(self, worker: str, name: str) -> dict[str, float]:
        """One worker's, with its labels."""
        values = self.workers[WorkerId(worker)].node.records.counters.values
        return {key: value for key, value in values.items() if key.startswith(name)}

    def lost(self, cause: str) -> float:
        name = f'lost_tokens_total{{cause="{cause}"}}'
        return sum(counters.values.get(name, 0.0) for counters in self.all_counters())

    def saw(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    # ------------------------------------------------------------ the network

    def _policy(self, parcel: Parcel) -> Fate:
        self.seen.append(parcel.message)
        late_s = self.fate(parcel.message)
        return LOST if late_s is None else Fate((self.random.uniform(*self.delay_s) + late_s,))


def drawn(name: str, length: int) -> list[int]:
    """A prompt that shares no beginning with another one's."""
    random = Random(name)
    return [random.randrange(VOCABULARY) for _ in range(length)]


def check_exact(answer: Answer, prompt: list[int], max_tokens: int = 8) -> None:
    assert (answer.end, answer.ids) == ("length", continuation(prompt, max_tokens))
