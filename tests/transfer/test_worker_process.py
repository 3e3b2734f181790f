"""What a worker process decides before it serves."""

from __future__ import annotations

from typing import Any, cast

import torch

from common.worker_settings import WorkerSettings
from kernels.cache import CacheLayout, PagedCache
from transfer.worker_process import CPU_STEP_TOKENS, tokens_of_a_step


def test_a_step_has_as_many_tokens_as_asked_or_as_suit_the_device() -> None:
    class Runner:
        cache = PagedCache(CacheLayout(1, 1, 16, 16, torch.float32), 1)

    runner = cast(Any, Runner())
    asked = WorkerSettings(coordinator="tcp://127.0.0.1:1", max_num_batched_tokens=77)
    unasked = WorkerSettings(coordinator="tcp://127.0.0.1:1")
    assert tokens_of_a_step(asked, runner) == 77
    assert tokens_of_a_step(unasked, runner) == CPU_STEP_TOKENS
