"""A worker's loop around a real decode worker: how it drains, and what a handler that raises costs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from common.batching import Batch
from common.errors import BadConfiguration, IllegalMove
from common.messages import Block, Drain, Ended, Message, Refused, RegistrationRefused, Sender, SetRole, Stop
from common.request import Attempt, Grammar, Incarnation, Key, RequestId
from tests.coordinator.cluster_bench import card
from tests.transfer.small_worker import LIMIT_S, SmallWorker, decode_of
from transfer import worker_loop
from transfer.worker_loop import WorkerLoop

COORDINATOR = Sender("coordinator", Incarnation(1))
FOR_EVER = 2000


class NoGrammars:
    def is_compiled(self, grammar: Grammar) -> bool:
        return True

    def compile(self, grammar: Grammar) -> str | None:
        return None

    def hold(self, grammar: Grammar) -> None:
        pass

    def let_go(self, grammar: Grammar) -> None:
        pass


class BareLinks:
    """Sockets to nowhere: keeps what is said, and lets the test say what comes."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.hear: Callable[[Message, Sender], None] | None = None

    def start(self, _: str, on_control: Callable[[Message, Sender], None], *others: object) -> None:
        self.hear = on_control

    def to_coordinator(self, message: Message) -> None:
        self.said.append(message)

    def to_front(self, front: str, message: Message) -> None:
        pass

    async def close(self) -> None:
        pass


class Scene(SmallWorker):
    """A loop that runs, with steps that take a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.links = BareLinks()
        self.loop = WorkerLoop(
            self.node,
            self._step,
            NoGrammars(),
            cast(Any, None),
            cast(Any, self.links),
            card("d0"),
            shutdown_timeout_s=LIMIT_S,
        )

    def _step(self, batch: Batch) -> Any:
        time.sleep(0.001)
        return self.model.run(batch), {}

    def hear(self, message: Message) -> None:
        assert self.links.hear is not None
        self.links.hear(message, COORDINATOR)

    def give(self, name: str, max_tokens: int) -> Key:
        asked = decode_of(name, max_tokens)
        self.hear(asked)
        return asked.key

    def ends(self) -> dict[Key, tuple[str, bool]]:
        return {m.key: (m.outcome, m.retryable) for m in self.links.said if isinstance(m, Ended)}

    def play(self, act: Callable[[], Awaitable[None]]) -> float:
        """Runs the loop while `act` does its part; how long it took to end after that."""

        async def both() -> float:
            running = asyncio.create_task(self.loop.run("nowhere"))
            await asyncio.sleep(0)
            await act()
            began = asyncio.get_running_loop().time()
            await asyncio.wait_for(running, LIMIT_S)
            return asyncio.get_running_loop().time() - began

        took_s = asyncio.run(both())
        assert self.node.idle
        return took_s


def test_a_drain_lets_what_runs_end_and_takes_nothing_new(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level("INFO")

    async def act() -> None:
        key = scene.give("a", 200)
        scene.hear(Drain(LIMIT_S))
        for _ in range(3):  # of the loop's turns: the drain begins
            await asyncio.sleep(0)
        assert not scene.node.idle, "it was over before the drain began"
        late = scene.give("b", 1)
        assert [m.key for m in scene.links.said if isinstance(m, Refused) and m.reason == "draining"] == [
            late
        ]
        assert key not in scene.ends()

    scene.play(act)
    assert scene.ends() == {(RequestId("a"), Attempt(1)): ("finished", True)}
    assert scene.pool.held == 0
    assert "draining; requests under way: 1" in caplog.text


@pytest.mark.parametrize("deadline_s", [0.0, 0.1])
def test_what_has_not_ended_by_the_deadline_is_given_back(deadline_s: float) -> None:
    scene = Scene()

    async def act() -> None:
        scene.give("a", FOR_EVER)
        scene.hear(Drain(deadline_s))

    took_s = scene.play(act)
    assert deadline_s <= took_s < deadline_s + 1.0
    assert scene.ends() == {(RequestId("a"), Attempt(1)): ("aborted", True)}, "it goes on elsewhere"


def test_asked_again_the_earliest_deadline_counts() -> None:
    scene = Scene()

    async def act() -> None:
        scene.give("a", FOR_EVER)
        for deadline_s in (60.0, 0.1, 60.0):
            scene.hear(Drain(deadline_s))

    assert scene.play(act) < 1.0


def test_a_first_signal_after_a_drain_still_drains_and_a_second_one_stops_at_once() -> None:
    scene = Scene()

    async def act() -> None:
        scene.give("a", FOR_EVER)
        scene.hear(Drain(60.0))
        scene.loop.stop()
        await asyncio.sleep(0.1)
        assert not scene.node.idle, "it has its time"
        scene.loop.stop()

    assert scene.play(act) < 1.0
    assert scene.ends() == {(RequestId("a"), Attempt(1)): ("aborted", True)}


@pytest.mark.parametrize("deadline_s", [0.0, 0.1])
def test_who_is_to_change_its_role_drains_for_that(deadline_s: float) -> None:
    scene = Scene()

    async def act() -> None:
        scene.give("a", FOR_EVER)
        scene.hear(SetRole("prefill", deadline_s))

    took_s = scene.play(act)
    assert deadline_s <= took_s < deadline_s + 1.0
    assert scene.loop.changes_role
    assert scene.ends() == {(RequestId("a"), Attempt(1)): ("aborted", True)}, "it goes on elsewhere"


def test_the_role_that_it_has_is_no_reason_to_drain() -> None:
    scene = Scene()

    async def act() -> None:
        scene.hear(SetRole("decode", 0.0))
        await asyncio.sleep(0.05)
        assert not scene.node.draining
        scene.hear(Drain(0.0))

    scene.play(act)
    assert not scene.loop.changes_role


def test_who_is_signalled_amid_the_change_leaves_for_good() -> None:
    scene = Scene()

    async def act() -> None:
        scene.hear(SetRole("prefill", 60.0))
        scene.loop.stop()

    scene.play(act)
    assert not scene.loop.changes_role


# ---------------------------------------------------------------- a handler that raises


def illegal(*_: object) -> Any:
    raise IllegalMove("a request cannot go from here to there")


def test_a_handler_that_raises_costs_its_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Stop for "a" that cannot be carried out: "a" ends at once, for good, its blocks are back, "b" goes on."""
    scene = Scene()

    async def act() -> None:
        a, b = scene.give("a", FOR_EVER), scene.give("b", 200)
        await asyncio.sleep(0.02)
        with monkeypatch.context() as broken:
            broken.setattr(scene.node, "_end_on_command", illegal)
            scene.hear(Stop(*a))
        assert scene.ends() == {a: ("failed", False)}
        assert scene.node.live_keys() == [b]
        scene.hear(Drain(LIMIT_S))

    scene.play(act)
    assert scene.ends()[(RequestId("b"), Attempt(1))] == ("finished", True)
    assert scene.pool.held == 0
    assert scene.node.records.counters.values["internal_errors_total"] == 1


def test_what_could_not_be_taken_fails_too_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    async def act() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(scene.node, "_decode", illegal)
            a = scene.give("a", 5)
        scene.give("a", 5)  # the coordinator asks again
        assert [m.key for m in scene.links.said if isinstance(m, Ended) and not m.retryable] == [a, a]
        assert scene.node.idle
        scene.hear(Drain(0.0))

    scene.play(act)


def test_only_our_own_words_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    errors = [IllegalMove("a request cannot go back"), KeyError("what the client sent")]

    def raises(*_: object) -> Any:
        raise errors.pop(0)

    async def act() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(scene.node, "_decode", raises)
            for name in ("a", "b"):
                scene.give(name, 5)
        said = [m.reason for m in scene.links.said if isinstance(m, Ended)]
        assert said == ["IllegalMove: a request cannot go back", "KeyError"]
        scene.hear(Drain(0.0))

    scene.play(act)


def test_what_steps_have_to_say_goes_out_though_the_turn_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    async def act() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(scene.node, "turn", illegal)
            with pytest.raises(IllegalMove):
                scene.give("a", 1)
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            await asyncio.sleep(0.1)
            assert scene.ends() == {(RequestId("a"), Attempt(1)): ("finished", True)}
        scene.hear(Drain(0.0))

    scene.play(act)


def test_a_worker_that_cannot_even_end_a_request_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    async def act() -> None:
        monkeypatch.setattr(scene.node, "finish", illegal)
        monkeypatch.setattr(scene.node, "fail", illegal)
        scene.give("a", 5)

    with pytest.raises(IllegalMove):
        scene.play(act)


@pytest.mark.parametrize("part", ["place", "store"])
def test_a_block_that_raises_costs_its_request_and_not_those_beside_it(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Where its place is asked, and where the bytes are stored: three in a message, the second one raises."""
    scene = Scene()
    headers = [Block(RequestId(name), Attempt(1), 0, 0, 0, 0) for name in ("a", "b", "c")]
    heard: list[str] = []

    def place(header: Block, sender: object) -> int | None:
        if part == "place" and header.id == "b":
            illegal()
        return 7

    def stored(cache: object, came: Any, place: Callable[[Block], int | None]) -> list[bool]:
        for header, _ in came:
            place(header)
            if part == "store" and header.id == "b":
                illegal()
        return [True] * len(came)

    async def act() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(scene.node, "place", place)
            broken.setattr(scene.node, "block", lambda header, *_: heard.append(header.id))
            broken.setattr(worker_loop, "store_wanted", stored)
            scene.loop._blocks(COORDINATOR, [(header, memoryview(b"")) for header in headers])
        assert heard == ["a", "c"]
        assert scene.ends() == {headers[1].key: ("failed", False)}
        scene.hear(Drain(0.0))

    scene.play(act)


def test_BR_144_a_refused_worker_ends_with_2_and_says_both_values_and_what_to_do() -> None:
    async def refused(scene: Scene) -> None:
        scene.hear(RegistrationRefused("dtype", "bfloat16", "float16"))

    scene = Scene()
    with pytest.raises(BadConfiguration) as ended:
        scene.play(lambda: refused(scene))
    assert ended.value.exit_code == 2
    for words in ("dtype is bfloat16 there and float16 here", "start it with the model, dtype"):
        assert words in ended.value.message


def test_a_step_that_ends_after_the_sockets_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Told twice to stop, a worker does not wait for the step that is out."""
    scene = Scene()
    begun, go_on = threading.Event(), threading.Event()

    def step(batch: Batch) -> Any:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return scene.model.run(batch), {}

    scene.loop._stepping._step = step

    async def act() -> None:
        scene.give("a", FOR_EVER)
        assert await asyncio.to_thread(begun.wait, LIMIT_S)
        scene.loop.stop()
        scene.loop.stop()

    closed = scene.links.close
    said_at_close: list[int] = []

    async def close() -> None:
        await closed()
        said_at_close.append(len(scene.links.said))
        go_on.set()
        await asyncio.sleep(0.05)

    scene.links.close = close  # type: ignore[method-assign]
    scene.play(act)
    assert said_at_close == [len(scene.links.said)]
    assert scene.pool.held == 0, "what the late step held is given back all the same"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
