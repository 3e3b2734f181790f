"""Settings of a worker: how it computes and keeps its cache, and where it belongs."""

from __future__ import annotations

import os
import re
from typing import Literal, Self

from pydantic import model_validator

from common.blocks import least_blocks, too_few_blocks
from common.endpoints import Endpoint, checked, parse_address, parse_endpoint
from common.flags import flag
from common.gpu_settings import GpuSettings
from common.http_settings import Bytes
from common.process_settings import DEFAULT_CONTROL, ProcessSettings
from common.transfer_settings import TransferSettings

WorkerRole = Literal["prefill", "decode"]

LAST_PAIR_OF_PORTS = 65534
MOST = 2**31 - 1
"""Of blocks and positions, which kernels count in 32 bits. What memory has room for is known with the model only."""
MOST_STEP_TOKENS = 1 << 20
MOST_THREADS = 1024
WORKER_ID = r"((prefill|decode)-from-)?[A-Za-z0-9._-]{1,64}"  # one that changed its role has it in its id


class EngineSettings(GpuSettings, TransferSettings, ProcessSettings):
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "of weights and cache; auto: as stored", "model"
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where the model runs; auto: a GPU if any", "model")
    max_model_len: int | None = flag(
        None, "longest prompt and answer together; absent: the model's own limit", "engine", ge=1, le=MOST
    )
    max_num_seqs: int = flag(64, "requests that run at once on one worker", "engine", ge=1, le=4096)
    max_num_batched_tokens: int | None = flag(
        None,
        "tokens of one step: a longer prompt is computed in chunks of this; absent: 256 on a CPU, 2048 on a device",
        "engine",
        ge=1,
        le=MOST_STEP_TOKENS,
    )
    batching: Literal["continuous", "dynamic"] = flag(
        "continuous",
        "continuous: requests join and leave between steps; dynamic: request-level batches, a baseline for the bench: "
        "one runs until all of it has ended, then the next is formed. Collocated only",
        "scheduling",
    )
    batch_timeout_ms: float | None = flag(
        None,
        "how long --batching dynamic waits for a full batch (absent: 50); 0: static batching, which always does",
        "scheduling",
        ge=0,
        le=30_000,
        metavar="MS",
    )
    block_size: int = flag(16, "tokens in one KV block", "cache", ge=1, le=1024)
    num_kv_blocks: int | None = flag(
        None, "KV blocks per worker; absent: as --kv-cache-memory has room for", "cache", ge=1, le=MOST
    )
    kv_cache_memory: Bytes | None = flag(
        None,
        "bytes of KV cache per worker, such as 2GiB; absent: 512MiB on a CPU, on a GPU what --gpu-memory-utilization "
        "leaves",
        "cache",
        metavar="BYTES",
        ge=1,
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV of a prompt's beginning", "cache")
    prefix_cache_scope: Literal["global", "tenant"] = flag("global", "who shares cached prefixes", "cache")
    threads: int | None = flag(
        None,
        "threads that compute in one worker; absent: one per core it may use, which the workers of "
        "`kvferry serve` share",
        "process",
        ge=1,
        le=MOST_THREADS,
    )
    spare_threads: int | None = flag(
        None,
        "more of them in the C kernels, which do not wait for those that find no core: what one pool leaves idle "
        "another computes with; absent: none, and under `kvferry serve` without --threads as many again, as far as "
        "there are cores",
        "process",
        ge=0,
        le=MOST_THREADS,
    )
    decode_nice: int = flag(
        0,
        "niceness of decode workers: where they share cores with prefill workers, more gives prompts more of them, so "
        "that TTFT falls and ITL beside prompts rises",
        "process",
        ge=0,
        le=19,
    )

    @model_validator(mode="after")
    def _timeout_of_batches(self) -> Self:
        if self.batch_timeout_ms is not None and self.batching == "continuous":
            raise ValueError("--batch-timeout-ms is of --batching dynamic, and batching is continuous")
        return self

    @model_validator(mode="after")
    def _room_for_a_request(self) -> Self:
        if self.num_kv_blocks is not None:
            least = least_blocks(self.block_size, self.max_model_len)
            if self.num_kv_blocks < least:
                raise ValueError(
                    f"--num-kv-blocks {self.num_kv_blocks}: {too_few_blocks(least, self.block_size)}"
                )
        return self

    @property
    def batch_timeout_s(self) -> float:
        return (50.0 if self.batch_timeout_ms is None else self.batch_timeout_ms) / 1e3


class WorkerSettings(EngineSettings):
    coordinator: str = flag(
        DEFAULT_CONTROL, "control endpoint of the coordinator", "network", metavar="tcp://HOST:PORT"
    )
    advertise: str | None = flag(
        None,
        "address that other workers reach this one at: control on PORT, blocks on PORT+1; absent: where it listens",
        "network",
        metavar="HOST:PORT",
    )
    bind: str | None = flag(
        None,
        "address that it listens at for other workers, where that is not what they reach: behind NAT, in a container; "
        "absent: --advertise, or free ports of the address that leads to the coordinator",
        "network",
        metavar="HOST:PORT",
    )
    worker_id: str | None = flag(
        None, "name in logs and metrics; absent: role and process id", "process", metavar="NAME"
    )

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        there = checked("--coordinator", self.coordinator, parse_endpoint, keyed=self.curve_key is not None)
        if there.on_every_address or there.port is None:
            raise ValueError(
                f"--coordinator {self.coordinator}: expected tcp://HOST:PORT, the one that it is reached at"
            )
        for name, address in (("--advertise", self.advertise), ("--bind", self.bind)):
            if address is not None:
                found = checked(name, address, parse_address, keyed=self.curve_key is not None)
                if found.port is None or found.port > LAST_PAIR_OF_PORTS:
                    raise ValueError(
                        f"{name} {address}: a port from 1 to {LAST_PAIR_OF_PORTS}; the next is used too"
                    )
        if self.advertised is not None and self.advertised.told() != self.advertised:
            raise ValueError(
                f"--advertise {self.advertise}: means nothing on another machine; name one address"
            )
        self.refuse_untrusted("--coordinator", there)
        self.refuse_untrusted("--advertise", self.advertised)
        self.refuse_untrusted("--bind", self.bound)
        return self

    @property
    def advertised(self) -> Endpoint | None:
        return None if self.advertise is None else parse_address(self.advertise)

    @property
    def bound(self) -> Endpoint | None:
        """Where it is told to listen, if it is."""
        return self.advertised if self.bind is None else parse_address(self.bind)

    def name_as(self, role: WorkerRole) -> str:
        """In logs, metrics and to the others."""
        return self.worker_id or f"{role}-{os.getpid()}"

    @model_validator(mode="after")
    def _name(self) -> Self:
        if self.worker_id is not None and not re.fullmatch(WORKER_ID, self.worker_id):
            raise ValueError("--worker-id: 1 to 64 of A-Z a-z 0-9 . _ -")
        return self
