"""What a worker process decides before it serves."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from common.errors import BadConfiguration
from common.worker_settings import WorkerSettings
from kernels.cache import CacheLayout, PagedCache
from transfer.worker_process import CPU_STEP_TOKENS, refuse_tiny_cache, tokens_of_a_step


def test_a_step_has_as_many_tokens_as_asked_or_as_suit_the_device() -> None:
    class Runner:
        cache = PagedCache(CacheLayout(1, 1, 16, 16, torch.float32), 1)

    runner = cast(Any, Runner())
    asked = WorkerSettings(coordinator="tcp://127.0.0.1:1", max_num_batched_tokens=77)
    unasked = WorkerSettings(coordinator="tcp://127.0.0.1:1")
    assert tokens_of_a_step(asked, runner) == 77
    assert tokens_of_a_step(unasked, runner) == CPU_STEP_TOKENS


@pytest.mark.parametrize(("blocks", "longest"), [(3, 8192), (2, 48)])
def test_a_cache_that_a_short_chat_does_not_fit_is_refused_with_the_least_that_is_of_use(
    blocks: int, longest: int
) -> None:
    class Runner:
        cache = PagedCache(CacheLayout(1, 1, 16, 16, torch.float32), blocks)
        max_model_len = longest

    with pytest.raises(
        BadConfiguration, match=f"{blocks + 1} is the least .* --kv-cache-memory {(blocks + 1) * 2048}"
    ):
        refuse_tiny_cache(cast(Any, Runner()))
    Runner.cache = PagedCache(CacheLayout(1, 1, 16, 16, torch.float32), blocks + 1)
    refuse_tiny_cache(cast(Any, Runner()))
