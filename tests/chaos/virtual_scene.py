"""A virtual cluster with neighbours, in which one request is brought to a phase: by looking at the pure objects after
every event, and by holding a message back where the phase would be over in no time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_loop import VirtualLoop
from bench.virtual_model import VOCABULARY, continuation
from bench.virtual_network import HELD
from bench.virtual_worker import Shape, StepTime
from common.lifecycle import Phase
from common.request import Request, RequestId, SamplingParams, WorkerId, pack_ids, unpack_ids
from tests.chaos.plan import Station
from tests.chaos.virtual_post import Post, is_about
from transfer.receiver import TransferReceiver

CHUNK_TOKENS = 64
PROMPT_TOKENS = 200  # four chunks; 13 blocks, of which eight may be in flight
SHORT_TOKENS = 30  # so few that a busy prefill worker is given them ahead
OUTPUT_TOKENS = 60
TIGHT = (Station.PREFILLED, Station.PREEMPTED)
"""Phases in which the decode workers run out of blocks. The coordinator counts what a request needs as it comes; 42
blocks are just enough by that count for two neighbours and the request, and too few when the neighbours have grown."""
LIMIT_S = 20.0
WATCHED = RequestId("watched")


class Scene:
    def __init__(self, station: Station, seed: int, pairs: int) -> None:
        self.station = station
        self.random = Random(seed)
        self.tight = station in TIGHT
        self.pairs = pairs
        self.cluster = VirtualCluster(
            seed=seed,
            num_prefill=pairs,
            num_decode=pairs,
            prefill_shape=Shape(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=CHUNK_TOKENS),
            decode_shape=Shape(
                num_blocks=42 if self.tight else 128, max_num_seqs=8, max_num_batched_tokens=CHUNK_TOKENS
            ),
            step_time=StepTime(0.03, 0.001, 0.0005),
        )
        self.post = Post(self.cluster.network.policy)
        self.cluster.network.policy = self.post
        self.requests: list[Request] = []
        self.prefill, self.decode = WorkerId("prefill-0"), WorkerId("decode-0")
        """Who has the watched one when the fault falls."""

    # ------------------------------------------------------------ requests

    def ask(self, name: str, prompt_tokens: int, output_tokens: int, choices: int = 1) -> list[Answer]:
        """Greedy, sampled with a seed, or with an end id among its tokens, by chance."""
        prompt = [self.random.randrange(VOCABULARY) for _ in range(prompt_tokens)]
        seed = self.random.randrange(1 << 16)
        ids = continuation(prompt, output_tokens, 0, seed)
        may_end = self.random.random() < 0.4 and ids.index(ids[-7]) == output_tokens - 7
        ends = (ids[-7],) if may_end else ()
        group = [
            Request(
                RequestId(name if child == 0 else f"{name}-{child}"),
                pack_ids(prompt),
                SamplingParams(
                    output_tokens,
                    seed,
                    child,
                    temperature=self.random.choice((0.0, 1.0)),
                    end_token_ids=ends,
                ),
                FRONT,
                leader=name if choices > 1 else "",
            )
            for child in range(choices)
        ]
        self.requests += group
        return self.cluster.submit_group(group)

    def watch(self, prompt_tokens: int = PROMPT_TOKENS) -> None:
        """One in four asks for two choices, where there is room for both."""
        choices = 2 if not self.tight and self.random.random() < 0.25 else 1
        self.ask(WATCHED, prompt_tokens, OUTPUT_TOKENS, choices)

    def answer(self, request_id: RequestId = WATCHED) -> Answer:
        return self.cluster.answers[request_id]

    @property
    def neighbours(self) -> list[RequestId]:
        return [RequestId(f"neighbour-{index}") for index in range(2 * self.pairs)]

    # ------------------------------------------------------------ the way there

    def begin(self) -> None:
        """Neighbours that decode on both decode workers for as long as the fault lasts; in a tight pool as long as they
        fit."""
        cluster = self.cluster
        cluster.run(until=1.0)
        for index, name in enumerate(self.neighbours):
            self.ask(name, PROMPT_TOKENS, (150 if index % 2 else 90) if self.tight else 300)
        grown = 40 if self.station is Station.PREFILLED else 2
        self.until(lambda: all(len(self.answer(name).ids) >= grown for name in self.neighbours))

    def reach(self) -> None:
        """Asks, and goes on until the request stands where it should."""
        fillers = [f"filler-{index}" for index in range(self.pairs)]
        match self.station:
            case Station.WAITING:
                for name in fillers:
                    self.ask(name, PROMPT_TOKENS, OUTPUT_TOKENS)
                self.watch()
            case Station.QUEUED:
                for name in fillers:
                    self.ask(name, 2 * SHORT_TOKENS, OUTPUT_TOKENS)
                self.until(lambda: all(self.loop(f"prefill-{i}").batches for i in range(self.pairs)))
                self.watch(SHORT_TOKENS)
            case Station.SENDING:
                held = self.post.meet(
                    lambda p: p.kind == "Accept" and is_about(p, WATCHED), lambda fate: HELD, times=None
                )
                self.watch()
                self.until(lambda: self.stands() is Station.SENDING)
                held.times = held.met
                self.cluster.network.let_go()
                block = self.post.meet(
                    lambda p: p.kind == "Block" and is_about(p, WATCHED), lambda fate: fate
                )
                self.until(lambda: block.met > 0)
            case _:
                self.watch()
        self.until(lambda: self.stands() is self.station)
        tracked = self.cluster.cluster.tracker.get(WATCHED)
        assert tracked is not None
        self.prefill, self.decode = tracked.prefill or self.prefill, tracked.decode or self.decode

    def until(self, done: Callable[[], bool]) -> None:
        limit = self.cluster.now + LIMIT_S
        while not done():
            assert self.cluster.clock.step(limit), f"does not come to {self.station}"

    def loop(self, name: str) -> VirtualLoop:
        return self.cluster.loops[WorkerId(name)]

    # ------------------------------------------------------------ where it stands

    def stands(self) -> Station | None:
        """None between two phases."""
        tracked = self.cluster.cluster.tracker.get(WATCHED)
        if tracked is None:
            return None
        if tracked.life.phase is Phase.WAITING:
            return Station.WAITING
        assert tracked.prefill is not None and tracked.decode is not None
        return self._at_decode(self.loop(tracked.decode)) or self._at_prefill(
            self.loop(tracked.prefill), self.loop(tracked.decode)
        )

    def _at_decode(self, loop: VirtualLoop) -> Station | None:
        phase, answer = _phase_at(loop), self.answer()
        if phase == Phase.DECODE_READY:
            return Station.DELIVERED
        if phase == Phase.DECODING and len(answer.ids) >= OUTPUT_TOKENS // 3:
            return Station.DECODING
        if phase == Phase.PREEMPTED:
            return Station.PREEMPTED
        tracked = self.cluster.cluster.tracker.get(WATCHED)
        assert tracked is not None
        ended = loop.worker.node.records.ledger.how_ended(tracked.key)
        return Station.ENDED if ended is not None and ended.outcome == "finished" else None

    def _at_prefill(self, loop: VirtualLoop, target: VirtualLoop) -> Station | None:
        phase = _phase_at(loop)
        if phase == Phase.QUEUED:
            return Station.QUEUED
        if phase == Phase.KV_READY:
            assert isinstance(target.worker.transfers, TransferReceiver)
            accepted = any(key[0] == WATCHED for key in target.worker.node.live_keys())
            return Station.SENDING if accepted else Station.PREFILLED
        if phase != Phase.PREFILLING or not loop.batches:
            return None
        batch = loop.batches[0]
        for seq, start, samples in zip(batch.rows, batch.starts, batch.samples, strict=True):
            if seq.request.request_id == WATCHED:
                if samples:
                    return Station.LAST_CHUNK
                return Station.FIRST_CHUNK if start == seq.cached_tokens else Station.MIDDLE_CHUNK
        return None


def _phase_at(loop: VirtualLoop) -> str | None:
    live = loop.worker.node.heartbeat(0.0).live
    return next((phase for request_id, _, phase in live if request_id == WATCHED), None)


def expected(request: Request) -> list[int]:
    """The one right answer to it."""
    sampling = request.sampling
    ids = continuation(unpack_ids(request.prompt_ids), sampling.max_tokens, sampling.child, sampling.seed)
    at = [ids.index(end) + 1 for end in sampling.end_token_ids if end in ids]
    return ids[: min(at, default=len(ids))]
