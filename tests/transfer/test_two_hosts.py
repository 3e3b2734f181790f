"""KV between two hosts, as two network namespaces with a link between: cut and joined, and listened to on the way.

A giver is here, on the first host, a taker on the second. Without the cluster's key the bytes of a block are seen by
whoever is on the way; that is tried too, so that the other check is known to be able to fail.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from common.messages import PeerAddress
from tests.namespaces import HOSTS, Eavesdropper, TwoHosts, two_hosts
from tests.transfer.bare_pool import BarePool, content_of
from tests.transfer.channel_ends import HOST, KEY_FILE, Giver, address_of, until
from tests.transfer.pair import key
from tests.transfer.test_channels import ROOT, Other, digest_of
from transfer.cluster_key import new_key

SIZE = 64 << 10
BLOCKS = 128
AGAIN_LIMIT_S = 10.0
"""After the link is joined, until KV crosses it again."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


class Elsewhere(Other):
    """A taker on the second host."""

    def __init__(self, hosts: TwoHosts, transfer: str) -> None:
        taker = [sys.executable, "-m", "tests.transfer.channel_ends", "take", "decode-0", "1", transfer]
        self.process = subprocess.Popen(
            hosts.second(*taker, str(4 * BLOCKS), str(SIZE)),
            cwd=ROOT,
            env={**os.environ, HOST: HOSTS[1]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


@asynccontextmanager
async def giving_to(
    hosts: TwoHosts, transfer: str = "auto"
) -> AsyncIterator[tuple[Giver, Elsewhere, PeerAddress]]:
    pool = BarePool(BLOCKS, SIZE)
    pool.fill()
    giver, other = Giver(pool, transfer, timeout_s=2.0, retry_s=0.2), Elsewhere(hosts, transfer)
    giver.start()
    try:
        yield giver, other, address_of((await other.say())["address"])
    finally:
        other.close()
        await giver.close()


@pytest.mark.parametrize("keyed", [True, False])
def test_who_listens_on_the_way_sees_the_blocks_without_the_key_only(
    hosts: TwoHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setenv(HOST, HOSTS[0])
    if keyed:
        new_key(tmp_path / "key")
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))

    async def story() -> None:
        listening = Eavesdropper(hosts.links[0])
        async with giving_to(hosts) as (giver, other, target):
            giver.give(key(), list(range(16)), target)
            said = await other.say()
            assert said["digest"] == digest_of(list(range(16)), SIZE)
            assert list(said["channels"]) == ["tcp"], "no memory is shared between hosts"
            heard = listening.heard()
            listening.close()
            assert len(heard) > 16 * SIZE
            seen = [content_of(block, SIZE)[:32] in heard for block in range(16)]
            assert seen == [not keyed] * 16
            assert all((name in heard) is not keyed for name in (b"Handover", b"prefill-0", b"decode-0"))

    uvloop.run(asyncio.wait_for(story(), 40))


def test_process_groups_cross_hosts_and_whoever_listens_sees_the_blocks_despite_the_key(
    hosts: TwoHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they want --trust-network."""
    monkeypatch.setenv(HOST, HOSTS[0])
    new_key(tmp_path / "key")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))

    async def story() -> None:
        listening = Eavesdropper(hosts.links[0])
        async with giving_to(hosts, "gloo") as (giver, other, target):
            giver.give(key(), list(range(16)), target)
            said = await other.say()
            assert said["digest"] == digest_of(list(range(16)), SIZE)
            assert list(said["channels"]) == ["gloo"]
            heard = listening.heard()
            listening.close()
            assert all(content_of(block, SIZE)[:32] in heard for block in range(16))
            assert b"Handover" not in heard, "the control sockets are encrypted all the same"

    uvloop.run(asyncio.wait_for(story(), 40))


def test_a_link_that_is_cut_in_mid_transfer_is_used_again_by_itself(
    hosts: TwoHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOST, HOSTS[0])
    new_key(tmp_path / "key")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))

    async def story() -> None:
        async with giving_to(hosts) as (giver, other, target):
            whole = list(range(BLOCKS))
            giver.give(key("whole"), whole, target)
            await until(lambda: giver.sent)
            cutting, number = asyncio.create_task(asyncio.to_thread(hosts.cut)), 0
            while not (cutting.done() and giver.failed):  # one after the other, so that one is on its way
                if len(giver.events) > number:
                    number += 1
                    giver.give(key(f"cut {number}"), whole, target)
                await asyncio.sleep(0.001)
            sent = len(giver.sent)
            await until(lambda: giver.sender.settled)
            hosts.join()
            joined, number = time.monotonic(), 0
            while len(giver.sent) == sent:  # as a coordinator gives the next request there
                assert time.monotonic() - joined < AGAIN_LIMIT_S
                number, ended = number + 1, len(giver.events)
                giver.give(key(f"again {number}"), list(range(8)), target)
                await until(lambda: len(giver.events) > ended)  # noqa: B023 - of this turn
            print(f"KV crosses the link again {time.monotonic() - joined:.1f} s after it was joined")
            while not (said := await other.say())["done"].startswith("again"):
                pass
            assert said["digest"] == digest_of(list(range(8)), SIZE)

    uvloop.run(asyncio.wait_for(story(), 60))
