"""The plan of `serve` as data, and its running with stand-ins that answer the two paths it polls."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from common.config import parse_coordinator, parse_serve, parse_worker
from common.http_settings import API_KEY_VARIABLE
from common.paths import child_environment
from coordinator import admin_client
from coordinator.cores import Threads
from coordinator.launcher import (
    LOOK_FOR_HUNG_EVERY_S,
    Plan,
    key_in_words,
    make_plan,
    ready_lines,
    reserve_port,
)
from coordinator.supervisor import ChildSpec
from tests.processes import alive


def plan_of(*argv: str) -> Plan:
    plan = make_plan(parse_serve(argv, {}))
    for held in plan.held:
        held.close()
    return plan


def flags(spec: ChildSpec) -> list[str]:
    """The child's own part of its command line."""
    assert spec.argv[:3] == (sys.executable, "-P", "-m")
    return [arg for arg in spec.argv[4:] if "{parent_fd}" not in arg]


def test_one_process_each_and_all_on_one_control_port() -> None:
    plan = plan_of("--prefill", "2", "--decode", "1", "--threads", "3", "--port", "8123")
    assert [spec.name for spec in plan.specs] == ["coordinator", "prefill-0", "prefill-1", "decode-0"]
    assert [spec.argv[3] for spec in plan.specs] == [
        "coordinator",
        "prefill_node",
        "prefill_node",
        "decode_node",
    ]
    assert plan.threads == dict.fromkeys(("prefill-0", "prefill-1", "decode-0"), Threads(3))
    coordinator = parse_coordinator(flags(plan.specs[0]), {})
    workers = [parse_worker(flags(spec), "prefill") for spec in plan.specs[1:]]
    assert coordinator.port == 8123
    assert {worker.coordinator for worker in workers} == {coordinator.control}
    assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
    assert plan.url == "http://127.0.0.1:8123"


def test_each_worker_may_come_back_in_the_other_role_with_the_same_settings() -> None:
    plan = plan_of("--prefill", "1", "--decode", "2", "--threads", "3", "--num-kv-blocks", "77")
    coordinator, *workers = plan.specs
    assert coordinator.other is None
    others = [spec.other for spec in workers if spec.other is not None]
    assert [(other.name, other.argv[3]) for other in others] == [
        ("decode-from-prefill-0", "decode_node"),
        ("prefill-from-decode-0", "prefill_node"),
        ("prefill-from-decode-1", "prefill_node"),
    ]
    for first, other in zip(workers, others, strict=True):
        was, becomes = (parse_worker(flags(spec), "prefill") for spec in (first, other))
        assert becomes == was.model_copy(update={"worker_id": other.name})
        assert "--parent-fd={parent_fd}" in other.argv


@pytest.mark.parametrize(
    "argv, threads",
    [((), Threads(2, 2)), (("--threads", "3"), Threads(3)), (("--spare-threads", "0"), Threads(2))],
)
def test_what_one_worker_leaves_idle_another_has_unless_told_otherwise(
    argv: tuple[str, ...], threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.launcher.available_cores", lambda: 4)
    worker = parse_worker(flags(plan_of(*argv).specs[1]), "prefill")
    assert (worker.threads, worker.spare_threads) == (threads.own, threads.spare)


@pytest.mark.parametrize(("prefill", "decode", "each"), [(1, 1, 0.45), (0, 1, 0.9), (1, 6, 0.1285)])
def test_workers_on_one_gpu_share_what_was_granted_of_it(prefill: int, decode: int, each: float) -> None:
    plan = plan_of("--prefill", str(prefill), "--decode", str(decode))
    workers = [parse_worker(flags(spec), "decode") for spec in plan.specs[1:]]
    assert {worker.gpu_memory_utilization for worker in workers} == {each}
    assert sum(worker.gpu_memory_utilization for worker in workers) <= 0.9
    assert {worker.kv_cache_memory for worker in workers} == {None}, "each worker's device says how much"


def test_every_child_gets_the_pipe_of_the_launcher() -> None:
    assert all("--parent-fd={parent_fd}" in spec.argv for spec in plan_of().specs)


def test_a_port_that_was_promised_is_kept_for_the_child() -> None:
    """Nobody who asks for any port gets it; who asks for this one as our children do, gets it, also again."""
    plan = make_plan(parse_serve(["--port", "0"], {}))
    http, control = plan.held
    assert plan.url == f"http://127.0.0.1:{http.getsockname()[1]}"
    promised = {http.getsockname()[1], control.getsockname()[1]}
    others = [reserve_port("127.0.0.1") for _ in range(300)]
    assert promised.isdisjoint(other.getsockname()[1] for other in others)
    for _ in range(2):
        with (
            zmq.Context() as context,
            context.socket(zmq.ROUTER) as router,
        ):  # the context waits for its sockets
            router.bind(f"tcp://127.0.0.1:{control.getsockname()[1]}")
    for _ in range(2):
        with socketserver.ThreadingTCPServer(
            http.getsockname(), socketserver.BaseRequestHandler, False
        ) as server:
            server.allow_reuse_address = True
            server.server_bind()
            server.server_activate()
    for held in (*plan.held, *others):
        held.close()


def test_collocated_without_a_prefill_pool() -> None:
    assert parse_coordinator(flags(plan_of("--prefill", "0").specs[0]), {}).collocated
    assert not parse_coordinator(flags(plan_of().specs[0]), {}).collocated


def test_keys_are_on_no_command_line_and_reach_the_coordinator_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k3y-in-file\n")
    plan = plan_of("--api-key", "k3y-as-flag", "--api-key-file", str(tmp_path / "keys"))
    assert not any("k3y" in arg for spec in plan.specs for arg in spec.argv)
    coordinator, *workers = plan.specs
    assert parse_coordinator(flags(coordinator), coordinator.environ).api_keys == (
        "k3y-as-flag",
        "k3y-in-file",
    )
    assert all(API_KEY_VARIABLE not in worker.environ for worker in workers)


def test_tiers_reach_the_coordinator_and_flags_overrule_the_file(tmp_path: Path) -> None:
    config = tmp_path / "kvferry.toml"
    config.write_text("max_queue = 7\nmax_num_seqs = 5\n[tiers.interactive]\nttft_ms = 500\n")
    plan = plan_of("--config", str(config), "--max-queue", "1024")
    coordinator = parse_coordinator(flags(plan.specs[0]), {})
    assert coordinator.all_tiers["interactive"].ttft_ms == 500
    assert coordinator.max_queue == 1024
    assert parse_worker(flags(plan.specs[1]), "prefill").max_num_seqs == 5


def test_template_and_parser_reach_the_coordinator(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    coordinator = plan_of("--chat-template", str(file), "--tool-call-parser", "mistral").specs[0]
    settings = parse_coordinator(flags(coordinator), {})
    assert (settings.chat_template, settings.tool_call_parser) == (file, "mistral")


def test_the_line_to_try_is_a_whole_command() -> None:
    lines = ready_lines("http://127.0.0.1:1", "m", "YOUR_KEY")
    assert lines[-1].startswith("  curl http://127.0.0.1:1/v1/chat/completions -H ")
    assert '-H "Authorization: Bearer YOUR_KEY"' in lines[-1]
    assert "status kvferry status --url http://127.0.0.1:1" in lines
    plain = ready_lines(admin_client.DEFAULT_URL, "m", "")
    assert not any("Authorization" in line or "status" in line for line in plain)


@pytest.mark.parametrize(
    ("argv", "variable", "words"),
    [
        ([], "", ""),
        ([], "s3cret", f"${API_KEY_VARIABLE}"),
        ([], "s3cret,0ther", "YOUR_KEY"),
        (["--api-key", "s3cret"], "", "YOUR_KEY"),
    ],
)
def test_a_key_is_asked_for_in_words_that_work(argv: list[str], variable: str, words: str) -> None:
    assert key_in_words(parse_serve(argv, {API_KEY_VARIABLE: variable})) == words


# --- running it ---
#
# Stand-ins for coordinator and workers: real processes under the real launcher, without a model.

STAGE = """
import asyncio, sys
from common.config import parse_serve
from coordinator.launcher import Plan, _Service
from coordinator.supervisor import ChildSpec
from tests.processes import alive

port, pids, coordinator, worker = sys.argv[1:5]
settings = parse_serve(["--port", port, *sys.argv[5:]], {})
specs = (
    ChildSpec("coordinator", (sys.executable, "-c", coordinator, port, pids, "{parent_fd}")),
    ChildSpec("prefill-0", (sys.executable, "-c", worker, pids + "/prefill-0", "{parent_fd}")),
    ChildSpec("decode-0", (sys.executable, "-c", worker, pids + "/decode-0", "{parent_fd}")),
)
plan = Plan(f"http://127.0.0.1:{port}", "stand-in", specs, {"prefill-0": 1, "decode-0": 1})
sys.exit(asyncio.run(_Service(settings, plan).run()))
"""
COORDINATOR = """
import http.server, json, pathlib, signal, sys
from common.parent_watch import end_with_parent
end_with_parent(int(sys.argv[3]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
folder = pathlib.Path(sys.argv[2])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        rows = [
            {"id": p.name, "role": p.name.split("-")[0], "pid": int(p.read_text()), "blocks_total": 9,
             "state": "lost" if (folder / f".lost-{p.name}").exists() else "ready", "left": False,
             "becomes": None, "overdue": (folder / f".overdue-{p.name}").exists()}
            for p in folder.glob("[!.]*") if not (folder / f".gone-{p.name}").exists()
        ]
        body = json.dumps(rows).encode() if self.path == "/admin/workers" else b"ok"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
WORKER = """
import os, pathlib, signal, sys, time
from common.parent_watch import end_with_parent
end_with_parent(int(sys.argv[2]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
path = pathlib.Path(sys.argv[1])
path.with_name("." + path.name).write_text(str(os.getpid()))
path.with_name("." + path.name).rename(path)
print("loaded", flush=True)
time.sleep(60)
"""
STUBBORN_WORKER = WORKER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
UNLOADABLE_WORKER = "import sys; print('kvferry prefill: no such tensor', file=sys.stderr); sys.exit(4)"


class Stage:
    """The launcher as a process, with what it prints in files."""

    def __init__(self, folder: Path, worker: str, *flags: str, before: Sequence[str] = ()) -> None:
        """`before`: what comes before the command, such as a shell that is to become it."""
        self._held = reserve_port("127.0.0.1")
        self.port: int = self._held.getsockname()[1]
        self.pid_files = folder / "pids"
        self.pid_files.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *before,
                    sys.executable,
                    "-c",
                    STAGE,
                    str(self.port),
                    str(self.pid_files),
                    COORDINATOR,
                    worker,
                    *flags,
                ],
                stdout=out,
                stderr=err,
                env=child_environment(os.environ),
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, what: str) -> None:
        deadline_s = time.monotonic() + 15
        while what not in self.out + self.err:
            assert time.monotonic() < deadline_s, f"no {what!r} in {self.out}\n{self.err}"
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        return int((self.pid_files / name).read_text())

    def close(self) -> None:
        self._held.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def nobody_left(self) -> bool:
        """Within two seconds no worker lives and the port is free."""
        deadline_s = time.monotonic() + 2
        while time.monotonic() < deadline_s:
            left = [path for path in self.pid_files.glob("[!.]*") if alive(int(path.read_text()))]
            with socket.socket() as probe:
                if not left and probe.connect_ex(("127.0.0.1", self.port)) != 0:
                    return True
            time.sleep(0.02)
        return False


@pytest.fixture
def launch() -> Iterator[Callable[..., Stage]]:
    """Starts stages and leaves nothing of them behind."""
    with contextlib.ExitStack() as stages:

        def start(folder: Path, worker: str, *flags: str, before: Sequence[str] = ()) -> Stage:
            stage = Stage(folder, worker, *flags, before=before)
            stages.callback(stage.close)
            return stage

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ready_table_then_a_clean_stop(
    launch: Callable[..., Stage], tmp_path: Path, number: signal.Signals
) -> None:
    stage = launch(tmp_path, WORKER)
    stage.until("try it:")
    assert str(stage.pid("prefill-0")) in stage.out
    assert f"URL    http://127.0.0.1:{stage.port}/v1" in stage.out
    assert "prefill-0 │ loaded" in stage.err
    stage.process.send_signal(number)
    assert stage.process.wait(timeout=10) == 0
    assert stage.nobody_left()


def test_a_worker_killed_in_service_comes_back_with_another_pid(
    launch: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = launch(tmp_path, WORKER)
    stage.until("try it:")
    first = stage.pid("decode-0")
    os.kill(first, signal.SIGKILL)
    stage.until("died (ended by SIGKILL)")
    deadline_s = time.monotonic() + 10
    while stage.pid("decode-0") == first:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    stage.process.terminate()
    assert stage.process.wait(timeout=10) == 0


@pytest.mark.parametrize("sign", ["overdue", "lost", "gone"])
def test_a_worker_that_hangs_is_killed(launch: Callable[..., Stage], tmp_path: Path, sign: str) -> None:
    """Asked to leave or not; by its process id: the next life is left alone while the row is still the old one's."""
    stage = launch(tmp_path, WORKER, "--progress-timeout", "1")
    stage.until("try it:")
    first = stage.pid("decode-0")
    if sign == "gone":
        time.sleep(LOOK_FOR_HUNG_EVERY_S + 0.5)  # so that it was there once
    os.kill(first, signal.SIGSTOP)
    (stage.pid_files / f".{sign}-decode-0").touch()
    stage.until(f"decode-0 │ hangs, process {first}: killed")
    (stage.pid_files / f".{sign}-decode-0").unlink()
    stage.until("decode-0 │ died (ended by SIGKILL), starting it again")
    stage.process.terminate()
    assert stage.process.wait(timeout=10) == 0


def test_a_model_that_cannot_be_loaded_ends_serve_with_4_and_the_reason(
    launch: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = launch(tmp_path, UNLOADABLE_WORKER)
    assert stage.process.wait(timeout=10) == 4
    assert "cannot start: " in stage.err
    assert "exit code 4: kvferry prefill: no such tensor" in stage.err
    assert stage.nobody_left()


def test_BR_142_a_second_signal_stops_at_once(launch: Callable[..., Stage], tmp_path: Path) -> None:
    stage = launch(tmp_path, STUBBORN_WORKER, "--shutdown-timeout", "30")
    stage.until("try it:")
    stage.process.send_signal(signal.SIGINT)
    stage.until("once more stops at once")
    stage.process.send_signal(signal.SIGINT)
    assert stage.process.wait(timeout=3) == 1
    assert stage.nobody_left()


@pytest.mark.parametrize("times", [1, 2])
def test_BR_042_only_children_that_the_launcher_started_are_ended(
    launch: Callable[..., Stage], tmp_path: Path, times: int
) -> None:
    """A child that it inherited (a shell started it and became the launcher), in its own process group, lives on."""
    pid_file = tmp_path / "sleep"
    shell = ("sh", "-c", 'sleep 60 & echo $! > "$0"; exec "$@"', str(pid_file))
    stage = launch(tmp_path, STUBBORN_WORKER if times == 2 else WORKER, before=shell)
    stage.until("try it:")
    other = int(pid_file.read_text())
    try:
        stage.process.send_signal(signal.SIGINT)
        if times == 2:
            stage.until("once more stops at once")
            stage.process.send_signal(signal.SIGINT)
        stage.process.wait(timeout=10)
        assert stage.nobody_left()
        assert alive(other)
    finally:
        os.kill(other, signal.SIGKILL)


def test_kill_9_of_the_launcher_leaves_nobody(launch: Callable[..., Stage], tmp_path: Path) -> None:
    stage = launch(tmp_path, STUBBORN_WORKER)
    stage.until("try it:")
    stage.process.kill()
    stage.process.wait()
    assert stage.nobody_left()


def test_somebody_elses_service_on_the_port_is_not_taken_for_ours(
    launch: Callable[..., Stage], tmp_path: Path
) -> None:
    """Its workers have other process ids; our coordinator fails to bind and says so."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    theirs = launch(tmp_path / "theirs", WORKER)
    theirs.until("try it:")
    unbindable = "import sys, time; time.sleep(0.5); print('port taken'); sys.exit(3)"
    command = [sys.executable, "-c", STAGE, str(theirs.port), str(tmp_path / "ours"), unbindable, WORKER]
    ours = subprocess.run(
        command, capture_output=True, text=True, timeout=20, env=child_environment(os.environ)
    )
    assert ours.returncode == 3
    assert "port taken" in ours.stderr
    assert "try it:" not in ours.stdout
    theirs.process.terminate()
    assert theirs.process.wait(timeout=10) == 0
