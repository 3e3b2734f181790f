"""Whether a peer is there, from ZeroMQ's events in any order."""

from __future__ import annotations

import asyncio

import zmq

from transfer.presence import Presence


def test_who_was_turned_away_for_good_is_gone_though_hands_are_shaken_next_to_it() -> None:
    """The words about a block's socket and about control come in either order; in one of them it was forgotten."""

    async def story(shaken_first: bool) -> int:
        said = 0

        def gone() -> None:
            nonlocal said
            said += 1

        presence = Presence(gone)
        if shaken_first:
            presence.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        presence.refused()
        presence.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        await asyncio.sleep(0.02)
        presence.end()
        return said

    assert [asyncio.run(story(first)) for first in (False, True)] == [1, 1]


def test_who_ends_in_time_hears_nothing() -> None:
    async def story() -> list[str]:
        said: list[str] = []
        presence = Presence(lambda: said.append("gone"))
        presence.refused()
        presence.end()
        await asyncio.sleep(0.02)
        return said

    assert asyncio.run(story()) == []
