"""A coordinator with workers that only exist as registrations: tests say what they say, and see what they are told."""

from __future__ import annotations

from collections.abc import Mapping

from common.effects import Effect, ToFront, ToWorker
from common.front_messages import Progress, Submit
from common.messages import (
    Accepted,
    Heartbeat,
    Load,
    Message,
    PeerAddress,
    Prefill,
    Register,
    Role,
    Sender,
    Started,
)
from common.request import (
    FrontId,
    Incarnation,
    Key,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
    first_attempt_of_epoch,
    pack_ids,
)
from common.step_times import Coefficients
from coordinator.cluster import Cluster
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.targets import Targets

FRONT = FrontId("front")
FINGERPRINT = {"dtype": "bfloat16", "tokenizer": "t"}


def address(name: str, incarnation: int = 1) -> PeerAddress:
    return PeerAddress(
        WorkerId(name), Incarnation(incarnation), f"{name}:c{incarnation}", f"{name}:d{incarnation}"
    )


def card(
    name: str,
    incarnation: int = 1,
    *,
    blocks: int = 64,
    max_num_seqs: int = 8,
    chunk: int = 64,
    max_model_len: int = 512,
    **fingerprint: str,
) -> Register:
    role: Role = "prefill" if name.startswith("p") else "decode"
    return Register(
        role=role,
        fingerprint={**FINGERPRINT, **fingerprint},
        address=address(name, incarnation),
        channels=("tcp",),
        blocks_total=blocks,
        block_size=16,
        block_bytes=100,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        device="cpu",
        threads=1,
        pid=1,
        host="h",
        versions={},
    )


def heartbeat(
    *live: tuple[Key, str],
    draining: bool = False,
    progress_age_s: float = 0.0,
    step_model: Coefficients | tuple[()] = (),
    **counters: float,
) -> Heartbeat:
    return Heartbeat(
        load=Load(0, 0, 0, 0, 0, 0, 0.0, step_model),
        progress_age_s=progress_age_s,
        live=tuple((key[0], key[1], phase) for key, phase in live),
        last_seq={},
        counters=counters,
        histograms={},
        draining=draining,
    )


def request(
    name: str,
    tokens: int = 20,
    max_tokens: int = 5,
    *,
    priority: int = 0,
    tier: str = "default",
    first_id: int = 0,
) -> Request:
    return Request(
        RequestId(name),
        pack_ids(range(first_id, first_id + tokens)),
        SamplingParams(max_tokens=max_tokens),
        FRONT,
        priority=priority,
        tier=tier,
    )


class ClusterBench:
    """`told` is everything said to workers, `fronts` everything said to the front, in order."""

    def __init__(
        self,
        *names: str,
        epoch: int = 1,
        max_requests: int = 100,
        max_tokens: int = 10_000,
        targets: Mapping[str, Targets] | None = None,
        local_prefill: bool = False,
    ) -> None:
        self.now = 0.0
        self.told: list[tuple[str, Message]] = []
        self.fronts: list[Message] = []
        self.cluster = Cluster(
            Registry(tokenizer_hash="t", fronts={FRONT: "f"}),
            WaitingQueue(max_requests=max_requests, max_tokens=max_tokens),
            first_attempt=first_attempt_of_epoch(epoch),
            targets=targets,
            local_prefill=local_prefill,
        )
        self.incarnations: dict[str, int] = {}
        for name in names:
            self.join(name)
        self.told.clear()

    # ------------------------------------------------------------ doing

    def note(self, effects: list[Effect]) -> list[tuple[str, Message]]:
        """What workers are told now."""
        told = [(str(e.worker), e.message) for e in effects if isinstance(e, ToWorker)]
        self.told += told
        self.fronts += [e.message for e in effects if isinstance(e, ToFront)]
        return told

    def join(self, name: str, incarnation: int = 1, blocks: int = 64) -> list[tuple[str, Message]]:
        self.incarnations[name] = incarnation
        return self.say(name, card(name, incarnation, blocks=blocks))

    def say(self, name: str, message: Message, incarnation: int | None = None) -> list[tuple[str, Message]]:
        life = Incarnation(self.incarnations[name] if incarnation is None else incarnation)
        return self.note(self.cluster.from_worker(message, Sender(name, life), self.now))

    def submit(self, *wanted: Request, deadline_s: float | None = None) -> list[tuple[str, Message]]:
        return self.note(self.cluster.submit(Submit(wanted, deadline_s), self.now))

    def front(self, message: Message) -> list[tuple[str, Message]]:
        return self.note(self.cluster.from_front(message, self.now))

    def turn(self, at: float | None = None) -> list[tuple[str, Message]]:
        self.now = self.now if at is None else at
        return self.note(self.cluster.turn(self.now))

    def beat_all(self, *live: tuple[Key, str], at: float) -> None:
        """Everybody lives, and everybody says the same of what it holds."""
        self.now = at
        for name in self.incarnations:
            self.say(name, heartbeat(*live))
        self.turn()

    # ------------------------------------------------------------ a request on its way

    def dispatched(self, name: str = "a", tokens: int = 20, max_tokens: int = 5) -> tuple[Key, str, str]:
        """Submits; the attempt, and the pair of workers."""
        ((prefill, command),) = self.submit(request(name, tokens, max_tokens))
        assert isinstance(command, Prefill) and command.target is not None
        return command.key, prefill, str(command.target.worker)

    def accepted(self, name: str = "a") -> tuple[Key, str, str]:
        key, prefill, decode = self.dispatched(name)
        self.say(prefill, Accepted(*key, address(decode, self.incarnations[decode])))
        self.say(prefill, Started(*key, "prefilling"))
        return key, prefill, decode

    def decoding(self, name: str = "a", tokens_out: int = 1) -> tuple[Key, str, str]:
        key, prefill, decode = self.accepted(name)
        self.front(Progress(((key[0], 0, tuple(range(tokens_out))),)))
        self.say(decode, Started(*key, "decode_ready"))
        return key, prefill, decode

    def phase(self, name: str = "a") -> str:
        timeline = self.cluster.timeline(RequestId(name), self.now)
        assert timeline is not None
        return str(timeline["phase"])

    def check_settled(self) -> None:
        assert self.cluster.settled and self.cluster.num_running() == self.cluster.num_waiting() == 0
