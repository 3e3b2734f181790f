"""Two hosts with the cluster's key: the same answers, a link that is cut and joined, and a third who has no key.

The hosts are network namespaces (`namespaces.py`): coordinator and decode worker on the first, prefill worker on the
second, started by the commands of the README. What one host answers is asked of the shared service before.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.messages import Block, Cancel, Drain, Message, Sender, TokenRow, Tokens
from common.paths import child_environment
from common.request import Attempt, Incarnation, RequestId
from common.wire import encode
from tests.e2e.service import Api, Service
from tests.namespaces import HOSTS, Eavesdropper, TwoHosts, two_hosts
from transfer.cluster_key import new_key

READY_LIMIT_S = 60.0
BACK_LIMIT_S = 10.0
"""After a cut of a few seconds, until the other host takes part again."""
CONTROL, TOKENS, DECODE, PREFILL = 8701, 8702, 8703, 8705


@dataclass(frozen=True, slots=True)
class Alone:
    """What one host answers, and what its loopback shows of it to who listens."""

    short: tuple[list[int], dict[str, Any]]
    long: list[tuple[list[int], dict[str, Any]]]
    overheard: bytes


class Split(Api):
    """Use as a context; ready when entered."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        super().__init__()
        self.url = "http://127.0.0.1:8000"
        self.hosts = hosts
        self.key = new_key(folder / "cluster.key")
        keyed = f"--curve-key={folder / 'cluster.key'}"
        worker = [keyed, f"--coordinator=tcp://{HOSTS[0]}:{CONTROL}", "--threads=1", "--num-kv-blocks=160"]
        self._commands = {
            "coordinator": ["coordinator", keyed, f"--control=tcp://0.0.0.0:{CONTROL}",
                            f"--tokens-port={TOKENS}", "--worker-timeout=3", "--local-prefill=never"],
            "decode-0": ["decode_node", *worker, "--worker-id=decode-0", f"--advertise={HOSTS[0]}:{DECODE}"],
            "prefill-0": ["prefill_node", *worker, "--worker-id=prefill-0", f"--bind=0.0.0.0:{PREFILL}"],
        }  # fmt: skip
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Split:
        for name, command in self._commands.items():
            whole = [sys.executable, "-P", "-m", *command]
            with (self._folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    self.hosts.second(*whole) if name == "prefill-0" else whole,
                    env=child_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        try:
            self.until(lambda: self.states() == {"decode-0": "ready", "prefill-0": "ready"}, READY_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name, process in self._processes.items():
            process.kill()
            process.wait()
            if any(exc):
                print(f"--- {name}\n{self.log(name)}")
        self._client.close()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def states(self) -> dict[str, str]:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
        try:
            return {row["id"]: row["state"] for row in self.workers()}
        except OSError:
            return {}
        except Exception as error:  # httpx has an error of its own for each way of not being there
            return {"coordinator": repr(error)}

    def until(self, true: Callable[[], Any], limit_s: float) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        while not true():
            assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {self.states()}"
            time.sleep(0.05)
        return time.monotonic() - started


def said(service: Api, ids: list[int]) -> dict[str, Any]:
    answer = service.complete(ids, max_tokens=4, logprobs=3, ignore_eos=True)
    return {key: answer[key] for key in ("text", "logprobs", "finish_reason")}


@pytest.fixture(scope="module")
def alone(shared: Service, text_ids: list[int]) -> Alone:
    listening = Eavesdropper("lo") if os.geteuid() == 0 else None
    short = text_ids[1000:1100]
    answered = said(shared, short)
    overheard = b"" if listening is None else listening.heard()
    if listening is not None:
        listening.close()
    long = [text_ids[1100 + 40 * number : 1700 + 40 * number] for number in range(3)]
    return Alone((short, answered), [(ids, said(shared, ids)) for ids in long], overheard)


@pytest.fixture(scope="module")
def split(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with two_hosts() as hosts, Split(hosts, tmp_path_factory.mktemp("two_hosts")) as service:
        yield service


@pytest.fixture(scope="module")
def link(split: Split) -> Iterator[Eavesdropper]:
    listening = Eavesdropper(split.hosts.links[0])
    yield listening
    listening.close()


def readable(ids: list[int]) -> bytes:
    """Eight tokens of a prompt, as they travel."""
    return struct.pack("<8i", *ids[16:24])


def test_the_answer_is_that_of_one_host_and_who_listens_learns_nothing(
    alone: Alone, split: Split, link: Eavesdropper
) -> None:
    ids, answered = alone.short
    moved = split.metric("kv_transfer_bytes_total", channel="tcp")
    assert said(split, ids) == answered
    split.until(lambda: split.metric("kv_transfer_bytes_total", channel="tcp") > moved, 5.0)
    overheard = link.heard()
    assert len(overheard) > 1 << 20, "the blocks went over this link"
    names = (b"prefill-0", b"Heartbeat", b"Handover")
    assert readable(ids) not in overheard and not any(name in overheard for name in names)
    assert readable(ids) in alone.overheard, "in clear they are seen: the check can fail"
    assert any(name in alone.overheard for name in names)


def test_a_link_that_is_cut_in_mid_transfer_costs_time_only_and_is_used_again_by_itself(
    alone: Alone, split: Split, link: Eavesdropper
) -> None:
    link.heard()
    with ThreadPoolExecutor(len(alone.long)) as pool:
        started = time.monotonic()
        answers = [pool.submit(said, split, ids) for ids, _ in alone.long]
        crossed = 0
        while crossed < 4 << 20:  # of some forty megabytes
            assert time.monotonic() - started < 30
            crossed += len(link.heard())
            time.sleep(0.002)
        split.hosts.cut()
        cut = time.monotonic()
        assert [answer.result(60) for answer in answers] == [answered for _, answered in alone.long]
        print(f"answered {time.monotonic() - cut:.1f} s after the cut")
    split.until(lambda: split.states()["prefill-0"] == "lost", 10.0)
    assert said(split, alone.short[0]) == alone.short[1], "the first host goes on alone"
    split.hosts.join()
    back_s = split.until(lambda: split.states()["prefill-0"] == "ready", BACK_LIMIT_S)
    moved = split.metric("kv_transfer_bytes_total")
    fresh = alone.long[0][0][:-1]  # not what the prefix caches of the first host end with
    fresh_s = split.until(
        lambda: said(split, fresh[7:]) and split.metric("kv_transfer_bytes_total") > moved, 20.0
    )
    print(f"ready {back_s:.1f} s after the link was joined; KV crosses it again {fresh_s:.1f} s later")
    assert said(split, alone.long[1][0]) == alone.long[1][1]
    split.until_idle()


# ---------------------------------------------------------------- a third, without the key

GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096),
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(60),
    b"",
)


def test_a_third_without_the_key_neither_reads_nor_says_anything(alone: Alone, split: Split) -> None:
    rows = {row["id"]: row for row in split.workers()}
    refused = split.metric("refused_handshakes_total")
    odd = oddities(split)
    named = {name: Sender(name, Incarnation(row["incarnation"])) for name, row in rows.items()}
    context = zmq.Context()
    try:
        made = [
            stranger
            for knows in ("nothing", "the public key", "another key")
            for stranger in strangers(context, split, knows, named)
        ]
        bare = [socket.create_connection((host, port), 2) for host, port in doors() for _ in GARBAGE]
        for number, one in enumerate(bare):
            one.sendall(GARBAGE[number % len(GARBAGE)])
        with ThreadPoolExecutor(1) as pool:
            answers = [pool.submit(said, split, ids).result(60) for ids, _ in (alone.short, alone.long[2])]
        assert answers == [alone.short[1], alone.long[2][1]]
        silent = [one for one in made if one.type == zmq.DEALER and not one.poll(0)]
        assert len(silent) == 6, "nobody said a word to it"
        for one in bare:
            one.close()
    finally:
        context.destroy(linger=0)
    split.until(lambda: split.metric("refused_handshakes_total") > refused, 5.0)
    assert {row["id"]: row["incarnation"] for row in split.workers()} == {
        name: row["incarnation"] for name, row in rows.items()
    }, "nobody came in, nobody was put out"
    assert split.states() == {"decode-0": "ready", "prefill-0": "ready"}
    assert oddities(split) == odd
    assert "a process without the cluster's key calls" in split.log("coordinator")
    assert split.key.secret.decode() not in "".join(map(split.log, ("coordinator", "decode-0", "prefill-0")))
    split.until_idle()


def oddities(split: Split) -> list[float]:
    """What is counted of words that nobody should have said."""
    names = ("protocol_violations_total", "late_messages_total", "internal_errors_total")
    return [split.metric(name) for name in names]


def doors() -> list[tuple[str, int]]:
    ours = [(HOSTS[0], port) for port in (CONTROL, TOKENS, DECODE, DECODE + 1)]
    return [*ours, (HOSTS[1], PREFILL), (HOSTS[1], PREFILL + 1)]


def strangers(
    context: zmq.Context[zmq.Socket[bytes]], split: Split, knows: str, named: dict[str, Sender]
) -> list[zmq.Socket[bytes]]:
    """Sockets at every door, under the names of those who belong there, that have said what would do harm."""
    request = (RequestId("x"), Attempt(1))
    block = Block(*request, index=0, part=0, checksum=0, size=4)
    says: list[tuple[int, int, Message, str]] = [
        (CONTROL, zmq.DEALER, Drain(0.0), "decode-0"),
        (TOKENS, zmq.PUSH, Tokens(1, (TokenRow(*request, first=0, ids=(1,)),)), "decode-0"),
        (DECODE, zmq.DEALER, Cancel(*request, "gone"), "prefill-0"),
        (DECODE + 1, zmq.PUSH, block, "prefill-0"),
    ]
    made: list[zmq.Socket[bytes]] = []
    for port, kind, message, name in says:
        one = context.socket(kind)
        if knows != "nothing":
            public, one.curve_secretkey = zmq.curve_keypair()
            one.curve_publickey = public
            one.curve_serverkey = split.key.public if knows == "the public key" else public
        if kind == zmq.DEALER:
            one.setsockopt(zmq.IDENTITY, f"{name}/{named[name].incarnation}".encode())
        made.append(one)
        one.connect(f"tcp://{HOSTS[0]}:{port}")
        frames = [b"abcd"] if isinstance(message, Block) else []
        one.send_multipart([*frames, encode(message, named[name])], flags=zmq.NOBLOCK)
    return made
