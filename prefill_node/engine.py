"""The shell of a prefill worker: its pure worker, given to the process that all workers share."""

from __future__ import annotations

from functools import partial

from common.batching import BatchingCore
from common.ordering import POLICIES, Policy
from common.worker_settings import WorkerSettings
from kernels.loading import load_for_worker
from prefill_node.worker import PrefillWorker
from transfer.sender import TransferSender
from transfer.worker_process import run_worker


def run(settings: WorkerSettings) -> int:
    """Serves until SIGTERM; the exit code. Raises StartupError."""
    policy = POLICIES[settings.scheduling_policy]
    return run_worker(settings, "prefill", load_for_worker, partial(_make_worker, policy))


def _make_worker(
    policy: Policy, core: BatchingCore, fingerprint: str, block_bytes: int, _vocab_size: int, _inflight: int
) -> PrefillWorker:
    """Its forward pass looks at every prompt's ids itself. One batch at a time: what it samples goes elsewhere, and a
    chunk is long beside what is decided between two."""
    sender = TransferSender(block_bytes=block_bytes)
    return PrefillWorker(core, sender, fingerprint=fingerprint, block_bytes=block_bytes, policy=policy)
