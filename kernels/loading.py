"""From a model's name to a runner that serves it: what a worker process calls once, at its start."""

from __future__ import annotations

import logging
from pathlib import Path

from kernels.cache import AskedTooMuch, PoolMemory
from kernels.default_model import DefaultModelError, ensure_default_model, terminal_progress
from kernels.device import OnGpu, resolve_device
from kernels.pool_size import CPU_KV_CACHE_BYTES
from kernels.runner import ModelRunner, load_runner
from kernels.weights import find_model

log = logging.getLogger(__name__)


class ModelUnusable(RuntimeError):
    """The model is not there, or asks for something that is not honoured here; the message says which."""


def load_for_worker(
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
    spare_threads: int = 0,
    pool_memory: PoolMemory | None = None,
    gpu_memory_share: float = 0.9,
    step_tokens: int = 2048,
    eager: bool = False,
    fast_chunks: bool = False,
) -> tuple[Path, ModelRunner]:
    """The model's folder and its runner; None is the default model, fetched on first use. Without a size the cache is
    what suits the device; the last four are a GPU's (`OnGpu`).

    Progress goes to the log, a quarter at a time. Raises ModelUnusable, and AskedTooMuch where a flag is at fault.
    """
    try:
        folder = _default_model() if model is None else find_model(model)
        log.info("loading %s", folder)
        runner = load_runner(
            str(folder),
            dtype=dtype,
            device=device,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=_cache_bytes(device, num_blocks, kv_cache_bytes),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            threads=threads,
            spare_threads=spare_threads,
            progress=_log_quarters,
            pool_memory=pool_memory,
            gpu=OnGpu(gpu_memory_share, step_tokens, eager, fast_chunks),
        )
    except AskedTooMuch:
        raise
    except (ValueError, OSError, RuntimeError, DefaultModelError) as error:
        raise ModelUnusable(str(error)) from error
    return folder, runner


def _cache_bytes(device: str, num_blocks: int | None, asked: int | None) -> int | None:
    if num_blocks is None and asked is None and resolve_device(device).type == "cpu":
        return CPU_KV_CACHE_BYTES
    return asked


def _default_model() -> Path:
    with terminal_progress() as progress:
        return ensure_default_model(progress)


def _log_quarters(stage: str, done: int, total: int) -> None:
    if total and done and done * 4 // total > (done - 1) * 4 // total:
        log.info("loading: %d of %d %s", done, total, stage)
