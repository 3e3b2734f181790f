"""A worker process from settings to exit code: loads the model, binds, builds the pure worker, runs the loop.

How a model is loaded comes in as a function (this folder knows `kernels` for the cache alone), and so does what
differs by role: how the pure worker is made.

Why here: both nodes need it and may not import each other, `common` has no sockets and `kernels` no settings.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import uvloop

from common.batching import Batch, BatchingCore
from common.blocks import BlockPool, least_blocks, too_few_blocks
from common.coming_back import COMES_BACK
from common.counters import Counters
from common.endpoints import Endpoint, parse_endpoint
from common.errors import BadConfiguration, ModelCannotBeLoaded
from common.fingerprint import Fingerprint, Value, digest
from common.long_lived import keep_out_of_collections
from common.messages import PeerAddress, Register, Role, Sender
from common.process_space import process_space
from common.request import Grammar, Incarnation
from common.step_times import StepShape
from common.version import VERSION
from common.wire import PROTOCOL_MAJOR
from common.worker_settings import WorkerSettings
from kernels.cache import AskedTooMuch, PagedCache, PoolMemory
from transfer.addresses import address_towards
from transfer.cluster_key import ClusterKey, key_of
from transfer.isolating import ComingStep, IsolatingSteps
from transfer.links import Links
from transfer.niceness import stand_behind
from transfer.own_channels import receiving_ends, require_channel, sending_ends
from transfer.pure_worker import PureWorker
from transfer.rehearsal import Sizes, rehearse
from transfer.segment import PoolSegment
from transfer.sockets import allow_open_files, keep_freed_memory
from transfer.worker_loop import WorkerLoop

log = logging.getLogger(__name__)

CPU_STEP_TOKENS = 256
DEVICE_STEP_TOKENS = 2048


class Runner(Protocol):
    """What this file needs of `kernels.runner.ModelRunner`."""

    cache: PagedCache
    max_model_len: int
    max_num_seqs: int

    @property
    def vocab_size(self) -> int: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a batch may name tokens that the batch before it has yet to draw."""
        ...

    def describe(self) -> dict[str, str | int | float]: ...
    def launch(self, batch: Batch) -> ComingStep: ...
    def prepare_grammars(self) -> None: ...
    def has_grammar(self, kind: str, text: str) -> bool: ...
    def compile_grammar(self, kind: str, text: str) -> str | None:
        """None when it is ready; else why it cannot be."""
        ...

    def hold_grammar(self, kind: str, text: str) -> None: ...
    def let_grammar_go(self, kind: str, text: str) -> None: ...


class LoadModel(Protocol):
    """`kernels.loading.load_for_worker`: the model's folder and its runner."""

    def __call__(
        self,
        *,
        model: str | None,
        dtype: str,
        device: str,
        block_size: int,
        num_blocks: int | None,
        kv_cache_bytes: int | None,
        max_num_seqs: int,
        max_model_len: int | None,
        threads: int,
        spare_threads: int,
        pool_memory: PoolMemory | None,
        gpu_memory_share: float,
        step_tokens: int,
        eager: bool,
        fast_chunks: bool,
    ) -> tuple[Path, Runner]: ...


MakeNode = Callable[[BatchingCore, str, int, int, int], PureWorker]
"""Batching core, fingerprint digest, bytes per block, ids of the vocabulary and batches that the runner takes at a time
to the pure worker of a role."""


@dataclass(frozen=True, slots=True)
class RunnerGrammars:
    """A runner's grammars, in the terms of `common`."""

    runner: Runner

    def is_compiled(self, grammar: Grammar) -> bool:
        return self.runner.has_grammar(grammar.kind, grammar.text)

    def compile(self, grammar: Grammar) -> str | None:
        return self.runner.compile_grammar(grammar.kind, grammar.text)

    def hold(self, grammar: Grammar) -> None:
        self.runner.hold_grammar(grammar.kind, grammar.text)

    def let_go(self, grammar: Grammar) -> None:
        self.runner.let_grammar_go(grammar.kind, grammar.text)


def run_worker(settings: WorkerSettings, role: Role, load: LoadModel, make_node: MakeNode) -> int:
    """Serves until SIGTERM, Ctrl-C or a refusal; 0 after a clean stop, COMES_BACK where it is to begin anew in the
    other role. Raises StartupError."""
    key = key_of(settings.curve_key)
    require_channel(settings.transfer, settings.device)
    allow_open_files()
    if role == "decode":
        stand_behind(settings.decode_nice)
    threads = settings.threads or len(os.sched_getaffinity(0))
    started = time.monotonic()
    segment = PoolSegment()
    # Only who sends need show its pool, and memory that can be shown may have no huge pages (shmem_enabled).
    shown = role == "prefill" and settings.transfer in ("auto", "shm")
    model, runner = _load(settings, threads, load, segment.allocate if shown else None)
    refuse_tiny_cache(runner)
    keep_freed_memory()
    runner.prepare_grammars()
    measured = _rehearse(settings, runner, threads)
    log.info("model ready after %.1f s, %d threads", time.monotonic() - started, threads)
    return uvloop.run(_serve(settings, role, runner, model, segment, threads, make_node, key, measured))


def _load(
    settings: WorkerSettings, threads: int, load: LoadModel, pool_memory: PoolMemory | None
) -> tuple[Path, Runner]:
    """Raises ModelCannotBeLoaded with what is wrong, BadConfiguration where that is a flag of ours."""
    try:
        return load(
            model=settings.model,
            dtype=settings.dtype,
            device=settings.device,
            block_size=settings.block_size,
            num_blocks=settings.num_kv_blocks,
            kv_cache_bytes=settings.kv_cache_memory,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            threads=threads,
            spare_threads=settings.spare_threads or 0,
            pool_memory=pool_memory,
            gpu_memory_share=settings.gpu_memory_utilization,
            step_tokens=settings.max_num_batched_tokens or DEVICE_STEP_TOKENS,
            eager=settings.enforce_eager,
            fast_chunks=settings.attention_variant == "fast",
        )
    except AskedTooMuch as error:
        raise BadConfiguration(str(error)) from error
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelCannotBeLoaded(f"the model cannot be loaded: {error}") from error


def _rehearse(settings: WorkerSettings, runner: Runner, threads: int) -> list[tuple[StepShape, float]]:
    """As long as steps take where every core has other work too: what spare threads do is counted as if its own had
    done it. Raises ModelCannotBeLoaded where it cannot even be run."""
    layout = runner.cache.layout
    on_cpu = runner.cache.device.type == "cpu"
    sizes = Sizes(
        step_tokens=tokens_of_a_step(settings, runner),
        num_seqs=runner.max_num_seqs,
        longest=runner.max_model_len,
        blocks=runner.cache.num_blocks,
        block_size=layout.block_size,
    )
    try:
        return rehearse(runner, sizes, (lambda: time.process_time() / threads) if on_cpu else time.monotonic)
    except RuntimeError as error:
        raise ModelCannotBeLoaded(f"the model is loaded and its first step fails: {error}") from error


def refuse_tiny_cache(runner: Runner) -> None:
    """A cache whose size was given in bytes is known in blocks only now. Raises BadConfiguration."""
    cache, block_size = runner.cache, runner.cache.layout.block_size
    least = least_blocks(block_size, runner.max_model_len)
    if cache.num_blocks < least:
        size = least * cache.layout.block_bytes
        raise BadConfiguration(
            f"a KV cache of {cache.num_blocks} blocks: {too_few_blocks(least, block_size)}: --kv-cache-memory {size}"
        )


async def _serve(
    settings: WorkerSettings,
    role: Role,
    runner: Runner,
    model: Path,
    segment: PoolSegment,
    threads: int,
    make_node: MakeNode,
    key: ClusterKey | None,
    measured: Seq[tuple[StepShape, float]],
) -> int:
    layout = runner.cache.layout
    me = Sender(settings.name_as(role), Incarnation(time.time_ns() // 1000))
    fingerprint = fingerprint_of(runner, model)
    core = BatchingCore(
        BlockPool(runner.cache.num_blocks),
        block_size=layout.block_size,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=tokens_of_a_step(settings, runner),
        prefix_caching=settings.enable_prefix_caching,
        fingerprint=digest(fingerprint),
        tenant_scope=settings.prefix_cache_scope == "tenant",
    )
    most_inflight = 2 if runner.runs_ahead else 1
    node = make_node(core, digest(fingerprint), layout.block_bytes, runner.vocab_size, most_inflight)
    node.records.step_times.begin_with(measured)
    steps = IsolatingSteps(runner)
    bound, told = own_endpoints(settings)
    links = _links(settings, role, me, runner.cache, segment, node.records.counters, key, bound.host)
    address = links.bind(bound, told)
    log.info("takes transfers at %s; KV may travel over %s", address.control, " or ".join(links.channels))
    loop = WorkerLoop(
        node,
        steps.run,
        RunnerGrammars(runner),
        runner.cache,
        links,
        _card(settings, role, runner, address, links.channels, fingerprint, threads),
        shutdown_timeout_s=settings.shutdown_timeout,
        launch=steps.launch if node.max_inflight > 1 else None,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, loop.stop)
    keep_out_of_collections()
    await loop.run(settings.coordinator)
    return COMES_BACK if loop.changes_role else 0


def tokens_of_a_step(settings: WorkerSettings, runner: Runner) -> int:
    """As asked, or what suits the device. 256 tokens keep a CPU's arithmetic units busy: more take as long for each and
    make a prompt wait for its neighbours (SmolLM2, one thread: 256 in 91 ms, 512 in 195). A GPU needs more to be so."""
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    return CPU_STEP_TOKENS if runner.cache.device.type == "cpu" else DEVICE_STEP_TOKENS


def own_endpoints(settings: WorkerSettings) -> tuple[Endpoint, Endpoint]:
    """Where this worker listens, and what others are told of it. Raises CannotBind, BadConfiguration."""
    bound, advertised = settings.bound, settings.advertised
    if bound is not None and advertised is not None:
        return bound, advertised
    if bound is not None and not bound.on_every_address and not bound.has_zone:
        return bound, bound
    here = Endpoint(
        address_towards(parse_endpoint(settings.coordinator)), None if bound is None else bound.port
    )
    if here.has_zone:
        raise BadConfiguration(
            f"the coordinator is reached from {here.host}, whose zone means nothing on another machine: say with "
            "--advertise HOST:PORT where other workers reach this one"
        )
    return bound or here, here


def _links(
    settings: WorkerSettings,
    role: Role,
    me: Sender,
    cache: PagedCache,
    segment: PoolSegment,
    counters: Counters,
    key: ClusterKey | None,
    host: str,
) -> Links:
    """Sockets, and the channels of this role: a prefill worker sends, a decode worker receives, at `host`."""
    block_bytes = cache.layout.block_bytes
    if role == "prefill":
        ends = sending_ends(settings.transfer, me, cache, segment, cache.on_device)
        return Links(me, counters, block_bytes=block_bytes, sending=ends, key=key)
    receiving = receiving_ends(settings.transfer, me, counters, block_bytes, cache.on_device, host)
    return Links(me, counters, block_bytes=block_bytes, receiving=receiving, key=key)


def fingerprint_of(runner: Runner, model: Path) -> Fingerprint:
    """All that must be equal in two workers that exchange KV: the runner's facts, protocol and tokenizer."""
    facts: dict[str, Value] = dict(runner.describe())
    tokenizer = model / "tokenizer.json"
    if tokenizer.is_file():
        facts["tokenizer"] = hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).hexdigest()
    facts["protocol"] = PROTOCOL_MAJOR
    return facts


def _card(
    settings: WorkerSettings,
    role: Role,
    runner: Runner,
    address: PeerAddress,
    channels: tuple[str, ...],
    fingerprint: Fingerprint,
    threads: int,
) -> Register:
    layout = runner.cache.layout
    return Register(
        role=role,
        fingerprint=dict(fingerprint),
        address=address,
        channels=channels,
        blocks_total=runner.cache.num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=tokens_of_a_step(settings, runner),
        device=str(runner.cache.device),
        threads=threads,
        pid=os.getpid(),
        host=socket.gethostname(),
        versions={"kvferry": VERSION, "python": platform.python_version(), "torch": _version("torch")},
        whole_batches=settings.batching == "dynamic",
        process_space=process_space(),
        scheduling_policy=settings.scheduling_policy,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
