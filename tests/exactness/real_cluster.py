"""The virtual cluster with a real model in every worker: production objects, real tensors, no sockets.

Steps are decided as in production and take virtual time; what they compute is computed by `ModelRunner`s over
caches of their own, and a block that is sent is the bytes of one cache written into another. So a run is a
function of its inputs, and any two paths through the cluster can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.virtual_cluster import FRONT, Answer, VirtualCluster
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.batching import Batch, RowResult
from common.messages import Role
from common.request import Request, RequestId, SamplingParams, TokenLogprobs, pack_ids
from kernels.cache import CacheLayout, PagedCache
from kernels.model import CausalModel
from kernels.runner import ModelRunner
from transfer.isolating import IsolatingSteps

BLOCK = 16
POOL = 192
"""Blocks: 3,072 tokens. Every page of a pool is touched when it is made, which takes longer than many of these runs."""
THREADS = 1  # with more, threads that wait for each other make the tests crawl on a busy machine
LIMIT_S = 3600.0  # virtual: nothing here takes so long unless it hangs


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, bit for bit: ids, and per token its log-probability and the five best; of the prompt, if asked."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    end: str | None
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    sampling: SamplingParams


Corruption = Callable[["RealWorker", Batch], None]


class RealWorker(VirtualWorker):
    """One worker with a runner and a cache that starts full of NaN: what was never written must not matter."""

    def __init__(
        self, model: CausalModel, max_model_len: int, name: str, role: Role, shape: Shape, step_time: StepTime
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self.before_step: Corruption | None = None
        self.num_steps = 0
        super().__init__(name, role, shape, step_time)

    def start(self) -> None:
        super().start()
        config, shape = self._model.config, self.shape
        layout = CacheLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, shape.block_size, self._model.dtype
        )
        cache = PagedCache(layout, shape.num_blocks)
        cache.tensor.fill_(float("nan"))
        self.runner = ModelRunner(
            self._model, cache, shape.max_num_seqs, self._max_model_len, THREADS, "test"
        )
        self._steps = IsolatingSteps(self.runner)

    def compute(self, batch: Batch) -> Sequence[RowResult]:
        if self.before_step is not None:
            self.before_step(self, batch)
        self.num_steps += 1
        results, failed = self._steps.run(batch)
        assert not failed, failed
        return results

    def read_block(self, block: int) -> bytes:
        return bytes(self.runner.cache.read_blocks([block])[0])

    def write_block(self, block: int, content: object) -> None:
        assert isinstance(content, bytes)
        self.runner.cache.write_blocks([block], [content])


class RealCluster(VirtualCluster):
    """`shape` is every worker's; `prefill` and `decode` count them."""

    def __init__(
        self,
        model: CausalModel,
        *,
        prefill: int,
        decode: int,
        prefill_shape: Shape,
        decode_shape: Shape,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._asked = 0
        super().__init__(
            seed=1,
            num_prefill=prefill,
            num_decode=decode,
            prefill_shape=prefill_shape,
            decode_shape=decode_shape,
            # A chunk costs little more than a decode step, so that requests that come together run together.
            step_time=StepTime(0.008, 0.0005, 0.00001),
        )
        self.run(until=1.0)  # everybody has registered

    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> VirtualWorker:
        return RealWorker(self._model, self._max_model_len, name, role, shape, step_time)

    def worker(self, name: str) -> RealWorker:
        (found,) = [worker for worker in self.workers.values() if worker.name == name]
        assert isinstance(found, RealWorker)
        return found

    def open(self, ask: Ask) -> Answer:
        self._asked += 1
        request = Request(RequestId(f"r{self._asked}"), pack_ids(ask.prompt), ask.sampling, FRONT)
        return self.submit(request)

    def together(self, asks: Sequence[Ask]) -> list[Said]:
        """All at once; returns when all have ended and every worker holds nothing."""
        answers = [self.open(ask) for ask in asks]
        self.run_until(lambda: all(answer.end is not None for answer in answers))
        self.settle()
        return [said(answer) for answer in answers]

    def alone(self, asks: Sequence[Ask]) -> list[Said]:
        """One after the other."""
        return [self.together([ask])[0] for ask in asks]

    def run_until(self, done: Callable[[], bool]) -> None:
        limit = self.now + LIMIT_S
        while not done():
            assert self.now < limit, "the cluster hangs"
            self.run(until=self.now + 0.02)

    def settle(self) -> None:
        """Hand-overs are confirmed and every block is back; the books agree."""
        self.run(until=self.now + 6.0)  # a cancellation is said three times to a worker that is dead
        self.check_idle()

    def counted(self, name: str, counter: str) -> float:
        return self.worker(name).node.records.counters.total(counter)


def said(answer: Answer) -> Said:
    return Said(tuple(answer.ids), tuple(answer.logprobs), answer.end, tuple(answer.prompt_logprobs))


def pools(
    model: CausalModel, *, chunk: int = 512, decode: int = 1, decode_blocks: int = POOL, caching: bool = True
) -> RealCluster:
    """One prefill worker and `decode` decode workers."""
    return RealCluster(
        model,
        prefill=1,
        decode=decode,
        prefill_shape=Shape(POOL, BLOCK, 32, chunk, caching),
        decode_shape=Shape(decode_blocks, BLOCK, 32, chunk, caching),
        max_model_len=2048,
    )


def collocated(
    model: CausalModel, *, chunk: int = 512, decode: int = 1, blocks: int = POOL, caching: bool = True
) -> RealCluster:
    """Decode workers alone, which prefill by themselves."""
    return RealCluster(
        model,
        prefill=0,
        decode=decode,
        prefill_shape=Shape(1),
        decode_shape=Shape(blocks, BLOCK, 32, chunk, caching),
        max_model_len=2048,
    )
