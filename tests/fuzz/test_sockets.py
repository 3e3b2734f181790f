"""Issue 4, point 6, on a small scale (`make fuzz` is the whole): garbage at every socket of real objects, with honest
work beside it. No crash, no growth, all of it counted, nothing disturbed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.run import STAGES, Stage, attack_all

MESSAGES = 1000


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_garbage_is_counted_and_nothing_else_comes_of_it(stage: Stage) -> None:
    async def story() -> None:
        async for report in attack_all(stage, MESSAGES, seed=2):
            print(report)
            assert report.said == MESSAGES

    asyncio.run(asyncio.wait_for(story(), 120))
