"""A first token is held back just so far that the gap after it keeps its tier's target, and never past TTFT's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from common.config import Tier
from common.request import RequestId
from coordinator.door.connection import CONNECTION
from coordinator.first_token import FirstTokenPacing
from coordinator.front import Delta
from coordinator.http_api import create_app
from coordinator.recent_gaps import ENOUGH
from coordinator.streams import MailboxStream
from coordinator.targets import Targets
from coordinator.tiers import Tiers
from coordinator.tokenizer import Tokenizer
from tests.coordinator.in_process import post
from tests.coordinator.scripted_gateway import Script, ScriptedGateway

PROMISED = {"chat": Targets(ttft_s=0.5, itl_s=0.075), "plain": Targets(ttft_s=0.5)}


def paced(gaps_s: list[float]) -> FirstTokenPacing:
    pacing = FirstTokenPacing(PROMISED)
    for gap_s in gaps_s:
        pacing.observed(gap_s)
    return pacing


def test_gaps_over_the_target_are_held_down_to_it() -> None:
    pacing = paced([0.100] * 20)
    assert pacing.hold_s("chat", 0.2) == pytest.approx(0.1 - 0.9 * 0.075)
    assert pacing.hold_s("chat", 0.2, deadline_s=0.22) == pytest.approx(0.98 * 0.22 - 0.2)
    assert pacing.hold_s("chat", 0.2, deadline_s=0.2) == 0.0
    assert pacing.hold_s("plain", 0.2) == 0.0  # it promises no gap
    assert pacing.hold_s("unknown", 0.2) == 0.0


def test_gaps_that_keep_the_target_hold_nothing() -> None:
    assert paced([0.060] * 20).hold_s("chat", 0.2) == 0.0


def test_one_strange_gap_of_many_holds_nothing() -> None:
    assert paced([0.060] * 63 + [3.0]).hold_s("chat", 0.2) == 0.0


def test_nothing_is_held_before_it_is_known_what_is_usual() -> None:
    assert paced([0.1] * (ENOUGH - 1)).hold_s("chat", 0.0) == 0.0
    assert paced([0.1] * ENOUGH).hold_s("chat", 0.0) > 0.0


def test_old_gaps_are_forgotten() -> None:
    pacing = paced([0.1] * 64 + [0.05] * 64)
    assert pacing.hold_s("chat", 0.0) == 0.0


@given(
    gaps_s=st.lists(st.floats(0, 10), max_size=100),
    waited_s=st.floats(0, 2),
    ttft_s=st.none() | st.floats(0.01, 5),
    itl_s=st.floats(0.001, 1),
)
def test_no_hold_is_longer_than_the_gap_target_or_passes_the_ttft_target(
    gaps_s: list[float], waited_s: float, ttft_s: float | None, itl_s: float
) -> None:
    pacing = FirstTokenPacing({"t": Targets(ttft_s, itl_s)})
    for gap_s in gaps_s:
        pacing.observed(gap_s)
    hold_s = pacing.hold_s("t", waited_s)
    assert 0 <= hold_s <= itl_s
    assert hold_s == 0 or ttft_s is None or waited_s + hold_s <= ttft_s


def test_a_held_reader_goes_on_as_soon_as_the_second_token_is_there() -> None:
    async def story() -> None:
        stream = MailboxStream([RequestId("r")], lambda _: None, lambda *_: None)
        began = time.monotonic()
        await stream.wait(0.05)
        assert time.monotonic() - began > 0.04
        waiting = asyncio.create_task(stream.wait(30.0))
        await asyncio.sleep(0)
        stream.put(0, Delta(RequestId("r"), (7,), None, None, None))
        await asyncio.wait_for(waiting, 5)
        assert (await stream.next()).ids == (7,)
        stream.put(0, Delta(RequestId("r"), (8,), None, None, None))
        await asyncio.wait_for(stream.wait(30.0), 5)

    asyncio.run(story())


def test_streams_of_a_tier_with_targets_are_even_and_others_are_as_they_come(tokenizer: Tokenizer) -> None:
    """Gaps of 80 ms, a target of 40: the held part of the first gap is 44 ms; the held seconds are counted."""
    gateway = ScriptedGateway(lambda _: Script(ids=[504, 505, 506], gap_s=0.08))
    pacing = FirstTokenPacing({"default": Targets(), "even": Targets(ttft_s=5.0, itl_s=0.04)})
    app = create_app(
        gateway, tokenizer, gateway.metrics, served_models=("smol",),
        tiers=Tiers({"default": Tier(), "even": Tier()}), pacing=pacing,
    )  # fmt: skip

    async def first_gap_s(tier: str) -> float:
        times: list[float] = []

        async def timed(scope: Any, receive: Any, send: Any) -> None:
            async def stamped(message: MutableMapping[str, Any]) -> None:
                if b'"text": "' in message.get("body", b"") or b'"text":"' in message.get("body", b""):
                    times.append(time.monotonic())
                await send(message)

            del scope["state"][CONNECTION]  # so that every token passes by here
            await app(scope, receive, stamped)

        body = {"model": "smol", "prompt": "x", "max_tokens": 3, "stream": True, "service_tier": tier}
        reply = await post(timed, "/v1/completions", body)
        assert len(reply.events()) >= 3
        return times[1] - times[0]

    async def story() -> tuple[float, float]:
        for _ in range(ENOUGH):
            await first_gap_s("default")
        return await first_gap_s("default"), min([await first_gap_s("even") for _ in range(3)])

    plain_s, even_s = asyncio.run(story())
    assert plain_s > 0.07
    assert even_s < 0.06
    held = gateway.metrics.held.labels("even")._value.get()
    assert held == pytest.approx(3 * 0.04, abs=3 * 0.02)
    assert gateway.metrics.held.labels("default")._value.get() == 0
