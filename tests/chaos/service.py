"""A coordinator and two workers of each role, started one by one with the proxy between them all.

Nobody starts again what dies here but the test: so a death is a death, and a return is a new life of the same name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.paths import child_environment
from coordinator.launcher import reserve_port
from tests.chaos.proxy import COORDINATOR, Proxy
from tests.e2e.service import Api

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CHUNK_TOKENS = 128
DECODE_BLOCKS = 96
PREFILL_BLOCKS = 128
READY_LIMIT_S = 180.0  # five processes load at once, on a machine that others may use too
SETTLE_S = 2.0
_COORDINATOR_FLAGS = ("--worker-timeout=3", "--shutdown-timeout=10", "--local-prefill=never")
_WAY_FDS = {"tcp": 8, "shm": 9}
"""Of a prefill worker to each decode worker: two connections, what wakes the readers of two sockets and of who watches
them, and the door to its memory."""
_GUEST_FDS = {"tcp": 2, "shm": 4}
"""Of a decode worker for each prefill worker: two connections, the door, and what Python's map of its memory keeps."""


class HandStarted(Api):
    """Use as a context; ready when entered."""

    def __init__(self, folder: Path, transfer: str = "tcp") -> None:
        super().__init__()
        self._folder = folder
        self._transfer = transfer
        self._http, self._control = reserve_port("127.0.0.1"), reserve_port("127.0.0.1")
        self.port = self._http.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._endpoint = f"tcp://127.0.0.1:{self._control.getsockname()[1]}"
        self.proxy = Proxy(self._endpoint)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lives = 0
        self._pipe = os.pipe()  # whoever reads from it ends when we do
        self.taken_over = 0
        """Connections of workers to the coordinator that a later one of the same name took over (ROUTER_HANDOVER) while
        they stood silent. libzmq 4.3.5 reads such a one no more, so it never closes it: one open file is lost each time
        that a worker connects again over a link that is silent and not broken. A limit that is known, not a wish."""
        self._fds: dict[int, int] = {}
        self._read: dict[Path, int] = {}  # characters of each log

    def __enter__(self) -> HandStarted:
        self.proxy.__enter__()
        try:
            for name in (COORDINATOR, *WORKERS):
                self.start(name)
            self.until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()
        self._kill_all()
        self.proxy.__exit__()
        self._http.close()
        self._control.close()
        for end in self._pipe:
            os.close(end)

    def _kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    # ------------------------------------------------------------ lives

    def start(self, name: str) -> None:
        """A new life of `name`, which must not have one; `until_ready` waits for it."""
        self._lives += 1
        with (self._folder / f"{self._lives:03}-{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", *self._command(name), f"--parent-fd={self._pipe[0]}"],
                pass_fds=(self._pipe[0],),
                env=child_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _command(self, name: str) -> list[str]:
        if name == COORDINATOR:
            return ["coordinator", f"--port={self.port}", f"--control={self._endpoint}", *_COORDINATOR_FLAGS]
        role = name.partition("-")[0]
        blocks = PREFILL_BLOCKS if role == "prefill" else DECODE_BLOCKS
        return [
            f"{role}_node",
            f"--coordinator={self.proxy.control}",
            f"--worker-id={name}",
            f"--num-kv-blocks={blocks}",
            f"--max-num-batched-tokens={CHUNK_TOKENS}",
            f"--transfer={self._transfer}",
            "--threads=1",
            "--shutdown-timeout=10",
        ]

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """It dies, and its next life begins."""
        self.signal(name, signal.SIGKILL)
        self.processes[name].wait()
        self.start(name)

    def until_left(self, name: str, limit_s: float = 15.0) -> int:
        """After SIGTERM: its exit code; then its next life begins."""
        code = self.processes[name].wait(limit_s)
        self.start(name)
        return code

    def until_ready(self) -> None:
        """All are there, and idle."""
        self.until_there()
        self.until_idle()
        for name, process in self.processes.items():
            self._fds.setdefault(process.pid, self._open_files(name))

    def until_there(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while missing := self._missing():
            assert time.monotonic() < deadline, f"not ready: {missing}; logs in {self._folder}"
            time.sleep(0.05)

    def _missing(self) -> list[str]:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}; logs in {self._folder}"
        try:
            ready = {row["pid"] for row in self.workers() if row["state"] == "ready"}
        except OSError:
            return [COORDINATOR]
        except Exception as error:  # httpx has an error of its own for each way of not being there
            return [f"{COORDINATOR}: {error!r}"]
        return [name for name in WORKERS if self.processes[name].pid not in ready]

    # ------------------------------------------------------------ what is left over

    def too_many_files(self) -> dict[str, str]:
        """Survivors with more open files than when they were ready and nothing had happened yet."""
        found = {}
        for name, process in self.processes.items():
            limit = self._fds.get(process.pid)
            if limit is None:
                continue  # a life that has just begun
            now = self._open_files(name)
            if now > limit + self._for_peers(name):
                found[name] = f"{now} open files, {limit} at first"
        return found

    def _for_peers(self, name: str) -> int:
        """What a process needs besides once it has sent to, or heard from, every peer."""
        others = len(WORKERS) // 2
        if name.startswith("prefill"):
            return _WAY_FDS[self._transfer] * others
        return _GUEST_FDS[self._transfer] * others if name.startswith("decode") else self.taken_over

    def _open_files(self, name: str) -> int:
        return len(os.listdir(f"/proc/{self.processes[name].pid}/fd"))

    def faults(self) -> list[str]:
        """What no process should have had to say since this was last asked, nor the proxy."""
        said, self.proxy.faults = self.proxy.faults, []
        for log in sorted(self._folder.glob("*.log")):
            text = log.read_text(errors="replace")
            lines = text[self._read.get(log, 0) :].splitlines()
            self._read[log] = len(text)
            said += [f"{log.name}: {line}" for line in lines if "Traceback" in line or "Error" in line]
        return said
