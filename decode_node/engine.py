"""The shell of a decode worker: its pure worker, given to the process that all workers share."""

from __future__ import annotations

from functools import partial

from common.batching import BatchingCore
from common.ordering import POLICIES, Policy
from common.worker_settings import WorkerSettings
from decode_node.forming import Continuous, Forming, RequestLevel
from decode_node.worker import MAX_WAITING, DecodeWorker
from kernels.loading import load_for_worker
from transfer.receiver import TransferReceiver
from transfer.worker_process import run_worker


def run(settings: WorkerSettings) -> int:
    """Serves until SIGTERM; the exit code. Raises StartupError."""
    make = partial(_make_worker, _forming(settings), POLICIES[settings.scheduling_policy])
    return run_worker(settings, "decode", load_for_worker, make)


def _forming(settings: WorkerSettings) -> Forming:
    if settings.batching == "continuous":
        return Continuous()
    return RequestLevel(min(settings.max_num_seqs, MAX_WAITING), settings.batch_timeout_s)


def _make_worker(
    forming: Forming,
    policy: Policy,
    core: BatchingCore,
    fingerprint: str,
    block_bytes: int,
    vocab_size: int,
    max_inflight: int,
) -> DecodeWorker:
    return DecodeWorker(
        core,
        TransferReceiver(block_bytes=block_bytes),
        fingerprint=fingerprint,
        block_bytes=block_bytes,
        forming=forming,
        vocab_size=vocab_size,
        policy=policy,
        max_inflight=max_inflight,
    )
