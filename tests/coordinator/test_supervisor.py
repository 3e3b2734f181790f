"""The supervising core with small real processes as children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from common.coming_back import COMES_BACK
from common.paths import child_environment
from coordinator.backoff import Backoff
from coordinator.supervisor import ChildSpec, Death, Supervisor
from tests.processes import alive

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = """
import signal, sys, time
def leave(*_):
    print("asked", flush=True)
    time.sleep(0.2)
    print("leaves", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(60)
"""
CHANGING = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({COMES_BACK}))
print("up", flush=True)
time.sleep(60)
"""


def script(name: str, code: str, *argv: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code, *argv))


class Stage:
    """A supervisor and what it said."""

    def __init__(self, *specs: ChildSpec, first_s: float = 0.05) -> None:
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            specs,
            environ=child_environment(os.environ),
            say=lambda name, line: self.lines.append((name, line)),
            make_backoff=lambda: Backoff(first_s=first_s, limit_s=10),
        )
        self.supervisor.start()

    def said(self, name: str, text: str) -> int:
        return sum(1 for who, line in self.lines if who == name and text in line)

    async def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {limit_s} s; so far: {self.lines}"
            await asyncio.sleep(0.01)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_killed_child_is_started_again_and_the_others_are_left_alone() -> None:
    async def story() -> None:
        stage = Stage(script("a", SLEEPER), script("b", SLEEPER))
        await stage.until(lambda: stage.said("a", "up") == 1 and stage.said("b", "up") == 1)
        stage.supervisor.settled = True
        first = stage.supervisor.pids
        os.kill(first["a"], signal.SIGKILL)
        await stage.until(lambda: stage.said("a", "up") == 2)
        assert stage.said("a", "died (ended by SIGKILL), starting it again in 0.1 s") == 1
        assert stage.supervisor.pids["a"] != first["a"]
        assert stage.supervisor.pids["b"] == first["b"]
        await stage.supervisor.kill_all()
        assert not any(alive(pid) for pid in (*first.values(), *stage.supervisor.pids.values()))

    run(story)


def test_pauses_grow_and_a_stop_does_not_wait_for_them() -> None:
    async def story() -> None:
        stage = Stage(script("a", "raise SystemExit(5)"), first_s=0.2)
        stage.supervisor.settled = True
        await stage.until(lambda: stage.said("a", "in 0.8 s") == 1)
        assert [stage.said("a", f"in {pause_s} s") for pause_s in (0.2, 0.4, 0.8)] == [1, 1, 1]
        started_s = time.monotonic()
        assert await stage.supervisor.stop([(("a",), 5.0)])
        assert time.monotonic() - started_s < 0.75

    run(story)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_telling_exit_at_first_start_ends_it_all_with_the_childs_last_word(code: int) -> None:
    async def story() -> None:
        words = f"import sys; print('loading'); print('it broke', file=sys.stderr); sys.exit({code})"
        stage = Stage(script("a", words), script("b", SLEEPER))
        assert await stage.supervisor.gave_up == Death("a", code, "it broke")
        await stage.supervisor.kill_all()

    run(story)


def test_other_deaths_at_first_start_are_tried_three_times() -> None:
    async def story() -> None:
        stage = Stage(script("a", "print('here'); raise SystemExit(7)"))
        assert await stage.supervisor.gave_up == Death("a", 7, "here")
        assert stage.said("a", "here") == 3
        await stage.supervisor.kill_all()

    run(story)


def test_once_settled_nothing_gives_up() -> None:
    async def story() -> None:
        stage = Stage(script("a", "print('here'); raise SystemExit(4)"))
        stage.supervisor.settled = True
        await stage.until(lambda: stage.said("a", "here") == 4)
        assert not stage.supervisor.gave_up.done()
        await stage.supervisor.kill_all()

    run(story)


def comes_back(name: str, other: ChildSpec) -> ChildSpec:
    """Ends to come back as `other` once it is asked."""
    return replace(script(name, CHANGING), other=other)


@pytest.mark.parametrize("settled", [True, False])
def test_who_comes_back_in_another_role_is_started_so_at_once_and_when_it_dies(settled: bool) -> None:
    """And back. None of that is a death, before the whole was ready neither."""

    async def story() -> None:
        stage = Stage(comes_back("a", script("b", CHANGING)), first_s=0.3)
        stage.supervisor.settled = settled
        for round in (1, 2, 3):
            await stage.until(lambda r=round: stage.said("a", "up") == r)  # type: ignore[misc]
            os.kill(stage.supervisor.pids["a"], signal.SIGTERM)
            await stage.until(lambda r=round: stage.said("b", "up") == r)  # type: ignore[misc]
            assert stage.said("a", "left its role, starting it as b") == round
            os.kill(stage.supervisor.pids["a"], signal.SIGTERM)
        await stage.until(lambda: stage.said("a", "up") == 4)
        os.kill(stage.supervisor.pids["a"], signal.SIGTERM)
        await stage.until(lambda: stage.said("b", "up") == 4)
        assert not any("again" in line for _, line in stage.lines)
        os.kill(stage.supervisor.pids["a"], signal.SIGKILL)
        await stage.until(lambda: stage.said("b", "up") == 5)
        assert stage.said("b", "died (ended by SIGKILL), starting it again in 0.3 s") == 1
        assert await stage.supervisor.stop([(("a",), 5.0)]), "it is asked by its first name"

    run(story)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_who_cannot_live_in_its_other_role_gets_its_first_one_back(code: int) -> None:
    async def story() -> None:
        stage = Stage(comes_back("a", script("b", f"print('refused'); raise SystemExit({code})")))
        await stage.until(lambda: stage.said("a", "up") == 1)
        os.kill(stage.supervisor.pids["a"], signal.SIGTERM)
        await stage.until(lambda: stage.said("a", "up") == 2)
        assert stage.said("b", f"cannot live so (exit code {code}), starting it as a") == 1
        assert not stage.supervisor.gave_up.done()
        await stage.supervisor.kill_all()

    run(story)


def test_who_hangs_when_it_is_to_come_back_is_killed_and_comes_back() -> None:
    async def story() -> None:
        stage = Stage(comes_back("a", script("b", CHANGING)), script("c", SLEEPER))
        stage.supervisor.settled = True
        await stage.until(lambda: stage.said("a", "up") == stage.said("c", "up") == 1)
        pids = stage.supervisor.pids
        os.kill(pids["a"], signal.SIGSTOP)
        stage.supervisor.end_hung("a", pids["c"], comes_back=True)
        stage.supervisor.end_hung("b", pids["a"], comes_back=True)
        assert stage.said("a", "hangs") == stage.said("c", "hangs") == 0, (
            "another life, by its id or its process"
        )
        stage.supervisor.end_hung("a", pids["a"], comes_back=True)
        await stage.until(lambda: stage.said("b", "up") == 1)
        assert stage.said("a", "left its role, starting it as b") == 1
        stage.supervisor.end_hung("b", stage.supervisor.pids["a"], comes_back=False)
        await stage.until(lambda: stage.said("b", "up") == 2)
        assert stage.said("b", "died (ended by SIGKILL), starting it again in 0.1 s") == 1
        await stage.supervisor.kill_all()

    run(story)


def test_a_program_that_is_not_there_is_a_death_like_another() -> None:
    async def story() -> None:
        stage = Stage(ChildSpec("a", ("/nowhere/program",)))
        death = await stage.supervisor.gave_up
        assert death.code == 1
        assert "/nowhere/program" in death.last_line
        await stage.supervisor.kill_all()

    run(story)


def test_stop_asks_phase_by_phase() -> None:
    async def story() -> None:
        stage = Stage(script("front", POLITE), script("worker", POLITE))
        await stage.until(lambda: stage.said("front", "up") == stage.said("worker", "up") == 1)
        assert await stage.supervisor.stop([(("front",), 5.0), (("worker",), 5.0)])
        said = [line for line in stage.lines if line[1] != "up"]
        assert said == [("front", "asked"), ("front", "leaves"), ("worker", "asked"), ("worker", "leaves")]

    run(story)


def test_who_overstays_is_killed_and_that_is_no_clean_stop() -> None:
    async def story() -> None:
        stage = Stage(script("a", STUBBORN), script("b", POLITE))
        await stage.until(lambda: stage.said("a", "up") == stage.said("b", "up") == 1)
        pids = stage.supervisor.pids
        stopping = asyncio.create_task(stage.supervisor.stop([(("a",), 0.3), (("b",), 5.0)]))
        await stage.until(lambda: stage.said("b", "asked") == 1)
        assert not alive(pids["a"])
        assert not await stopping
        assert not any(alive(pid) for pid in pids.values())

    run(story)


def test_lines_arrive_whole_also_long_and_unfinished_ones() -> None:
    async def story() -> None:
        code = "import sys; w = sys.stdout.write; w('x' * 200_000 + '\\nshort\\n' + 'no newline')"
        stage = Stage(script("a", code + "; sys.stdout.flush(); raise SystemExit(2)"))
        assert (await stage.supervisor.gave_up).last_line == "no newline"
        lines = [line for _, line in stage.lines]
        assert "".join(lines) == "x" * 200_000 + "short" + "no newline"
        assert lines[-2:] == ["short", "no newline"]
        await stage.supervisor.kill_all()

    run(story)


def test_what_must_not_be_seen_travels_in_the_environment_of_one_child() -> None:
    async def story() -> None:
        show = "import os; print(os.environ.get('SECRET_OF_ONE')); raise SystemExit(2)"
        one = ChildSpec("one", (sys.executable, "-c", show), {"SECRET_OF_ONE": "42"})
        stage = Stage(one, script("two", show))
        await stage.until(lambda: stage.said("one", "42") == 1 and stage.said("two", "None") == 1)
        await stage.supervisor.kill_all()

    run(story)


LAUNCHER = """
import asyncio, os, sys
from common.paths import child_environment
from coordinator.supervisor import ChildSpec, Supervisor

BUSY = '''
import signal, sys
from common.parent_watch import end_with_parent
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
end_with_parent(int(sys.argv[1]))
print("up", flush=True)
while True:
    pass
'''

async def main():
    up = asyncio.Event()
    specs = [ChildSpec(name, (sys.executable, "-c", BUSY, "{parent_fd}")) for name in ("a", "b")]
    seen = set()
    def say(name, line):
        seen.add(name)
        if len(seen) == 2:
            up.set()
    supervisor = Supervisor(specs, environ=child_environment(os.environ), say=say)
    supervisor.start()
    await up.wait()
    print(*supervisor.pids.values(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_BR_041_kill_9_of_the_launcher_takes_busy_children_that_ignore_signals() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, env=child_environment(os.environ)
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.communicate()
    deadline_s = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "children outlived their launcher"
        time.sleep(0.02)
