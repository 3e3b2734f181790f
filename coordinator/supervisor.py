"""Keeps a set of child processes alive, and takes them along on every way out.

A child that dies is started again after a growing pause (`backoff.py`). Before the whole was ready once
(`settled`), a death that says why, by one of the exit codes that a person must act on, ends everything: bad
configuration, port taken, model cannot be loaded. So does a third death of one child for any other reason.

A child that ends in order to come back in another role (`common/coming_back.py`) has not died: it is started again at
once, by its other command line, and by that one also when it dies later. Where it cannot live so, it gets its first
one back.

One that hangs is killed (`end_hung`); if it was to leave, it has then left as it was to.

Ways out, and what ends the children: `stop` asks them in turn and kills who overstays; `kill_all` does not ask;
when this process dies without either, the pipe closes and each child leaves by itself (`common/parent_watch.py`).
Children run in sessions of their own, so that a Ctrl-C in the terminal reaches this process alone and the order
of stopping is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.coming_back import COMES_BACK
from coordinator.backoff import Backoff

FATAL_AT_FIRST_START = (2, 3, 4)
EARLY_DEATHS_ALLOWED = 2
LAST_LINES_KEPT = 20
LONGEST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `{parent_fd}` in an argument becomes the number of the pipe's read end.

    `environ` is for this child alone: what must not stand on a command line. `other`: what it becomes where it ends in
    order to come back as that; it keeps its place, and so its first name, among the children.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    other: ChildSpec | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended: exit code (negative: by that signal) and the last thing it said."""

    name: str
    code: int
    last_line: str

    @property
    def how(self) -> str:
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


@dataclass(slots=True)
class _Child:
    """One life of one process. `place`: the first name of whoever it is now."""

    place: str
    spec: ChildSpec
    process: asyncio.subprocess.Process
    comes_back: bool = False  # killed because it did not go by itself to come back in another role
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES_KEPT))


class Supervisor:
    """Use inside a running event loop: `start`, then `stop` or `kill_all`."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        environ: Mapping[str, str],
        say: Callable[[str, str], None],
        make_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """`say(name, line)` gets every line that a child writes, and ours about it."""
        self._specs = list(specs)
        self._environ = dict(environ)
        self._say = say
        self._make_backoff = make_backoff
        self._children: dict[str, _Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._pipe = os.pipe()
        self.settled = False
        self.gave_up: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        for spec in self._specs:
            self._keepers[spec.name] = asyncio.create_task(self._keep(spec), name=f"keep-{spec.name}")

    @property
    def pids(self) -> dict[str, int]:
        """First name → process id of those that live now."""
        return {name: child.process.pid for name, child in self._children.items()}

    async def stop(
        self, phases: Sequence[tuple[Iterable[str], float]], number: signal.Signals = signal.SIGTERM
    ) -> bool:
        """Asks the named ones to stop, phase by phase, each within its seconds. True if nobody had to be killed.

        Whoever asks again does so by another signal: of one that is pending already, the system keeps no second."""
        self._stopping.set()
        clean = True
        for names, limit_s in phases:
            wanted = [name for name in names if name in self._keepers]
            self._signal(wanted, number)
            keepers = [self._keepers[name] for name in wanted]
            if keepers:
                _, late = await asyncio.wait(keepers, timeout=limit_s)
                clean = clean and not late
            self._signal(wanted, signal.SIGKILL)
        await self.kill_all()
        return clean

    def end_hung(self, name: str, pid: int, *, comes_back: bool) -> None:
        """Kills the child that is `name` now and process `pid`. It is started again; if it was to come back in another
        role, in that one. Nothing where that life is over."""
        for child in self._children.values():
            process = child.process
            if (child.spec.name, process.pid, process.returncode) == (name, pid, None):
                self._say(name, f"hangs, process {pid}: killed")
                child.comes_back = comes_back
                process.kill()

    async def kill_all(self) -> None:
        """Ends every child at once and waits until the system has taken them back."""
        self._stopping.set()
        self._signal(list(self._children), signal.SIGKILL)
        if self._keepers:
            await asyncio.wait(self._keepers.values())
        if self._pipe != (-1, -1):
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = (-1, -1)

    def _signal(self, names: Iterable[str], number: signal.Signals) -> None:
        for name in names:
            if (child := self._children.get(name)) is not None and child.process.returncode is None:
                child.process.send_signal(number)

    async def _keep(self, first: ChildSpec) -> None:
        backoff = self._make_backoff()
        spec = first
        early_deaths = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            death = await self._live(first.name, spec)
            if self._stopping.is_set():
                return
            if (other := self._instead(first, spec, death)) is not None:
                spec = other
                continue
            early_deaths += 0 if self.settled else 1
            if not self.settled and (
                death.code in FATAL_AT_FIRST_START or early_deaths > EARLY_DEATHS_ALLOWED
            ):
                if not self.gave_up.done():
                    self.gave_up.set_result(death)
                return
            pause_s = backoff.after_death(time.monotonic() - started_s)
            what = "left" if death.code == 0 else "died"  # a worker that was drained leaves
            self._say(spec.name, f"{what} ({death.how}), starting it again in {pause_s:.1f} s")
            await self._pause(pause_s)

    def _instead(self, first: ChildSpec, spec: ChildSpec, death: Death) -> ChildSpec | None:
        """What is started at once, where that is another one."""
        if death.code == COMES_BACK and first.other is not None:
            other = first.other if spec is first else first
            self._say(spec.name, f"left its role, starting it as {other.name}")
            return other
        if spec is not first and death.code in FATAL_AT_FIRST_START:
            self._say(spec.name, f"cannot live so ({death.how}), starting it as {first.name}")
            return first
        return None

    async def _live(self, place: str, spec: ChildSpec) -> Death:
        """One life of one child, from start to end."""
        try:
            child = await self._spawn(place, spec)
        except OSError as error:  # no memory, no process ids: may pass
            return Death(spec.name, 1, f"cannot be started: {error}")
        return await self._until_dead(child)

    async def _pause(self, seconds: float) -> None:
        """Returns early when stopping begins."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _spawn(self, place: str, spec: ChildSpec) -> _Child:
        process = await asyncio.create_subprocess_exec(
            *(arg.replace("{parent_fd}", str(self._pipe[0])) for arg in spec.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environ, **spec.environ},
            pass_fds=(self._pipe[0],),
            start_new_session=True,
        )
        child = _Child(place, spec, process)
        self._children[place] = child
        if self._stopping.is_set():  # asked to stop while the system was starting it
            process.kill()
        return child

    async def _until_dead(self, child: _Child) -> Death:
        assert child.process.stdout is not None
        reading = asyncio.create_task(self._pass_on_lines(child, child.process.stdout))
        code = await child.process.wait()
        if child.comes_back and code == -signal.SIGKILL:
            code = COMES_BACK
        # A grandchild may hold the pipe open: what the child said is in the buffer, nothing more is awaited.
        await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        del self._children[child.place]
        said = [line for line in child.last_lines if line.strip()]
        return Death(child.spec.name, code, said[-1] if said else "")

    async def _pass_on_lines(self, child: _Child, stream: asyncio.StreamReader) -> None:
        """Line by line; a longer one than LONGEST_LINE_BYTES is passed on in pieces."""
        rest = b""
        while chunk := await stream.read(LONGEST_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._hear(child, line)
        if rest:
            self._hear(child, rest)

    def _hear(self, child: _Child, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        child.last_lines.append(text)
        self._say(child.spec.name, text)
