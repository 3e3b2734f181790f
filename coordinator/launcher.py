"""`kvferry serve`: the whole service on this machine, as processes of its own.

Stations: the model is brought here → ports and threads are shared out → coordinator, prefill and decode workers are
started (`supervisor.py`) → all of them are ready: one table with the URL and a line to try → a signal, or a
child that cannot live → the coordinator drains, the workers follow.

The other folders are reached only by `python -m …`: this process loads no model and stays small.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.text import Text

from common.coming_back import MODULES, flags_in_other_role
from common.config import CoordinatorSettings, ServeSettings
from common.errors import BadConfiguration, CannotBind
from common.flags import to_argv, visible_fields
from common.http_settings import API_KEY_VARIABLE
from common.messages import Role
from common.paths import child_environment, require_own_folders
from common.roles import id_in_other_role, other_role
from common.worker_settings import EngineSettings
from coordinator import admin_client
from coordinator.cores import Threads, available_cores, share_cores
from coordinator.door.tls import own_client_context, server_context, why_refused
from coordinator.hung import HungOnes
from coordinator.model_folder import resolve_model
from coordinator.supervisor import FATAL_AT_FIRST_START, ChildSpec, Death, Supervisor
from transfer.cluster_key import key_of

COORDINATOR = "coordinator"
POLL_INTERVAL_S = 0.1
STILL_LOADING_EVERY_S = 15.0
LOOK_FOR_HUNG_EVERY_S = 2.0
# On top of --shutdown-timeout: to write the last bytes and leave.
LEAVING_S = 5.0
WORKERS_LEAVING_S = 10.0
LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be started. `threads` by worker name; `held` keeps ports for the children while it is open."""

    url: str
    model_name: str
    specs: tuple[ChildSpec, ...]
    threads: dict[str, Threads]
    held: tuple[socket.socket, ...] = ()


def serve(settings: ServeSettings) -> int:
    """Runs until a signal or a fault that a person must act on; returns the exit code of the contract."""
    require_own_folders()
    key_of(settings.curve_key)  # a fault of it is said once, by this process, before any child is started
    tls = own_client(settings)
    settings = settings.model_copy(update={"model": resolve_model(settings.model)})
    return asyncio.run(_Service(settings, make_plan(settings), tls).run())


def make_plan(settings: ServeSettings) -> Plan:
    """Chooses ports and threads and writes every child's command line."""
    held: list[socket.socket] = []
    port, control = settings.port, settings.control
    if port == 0:
        held.append(reserve_port(settings.host))
        port = held[-1].getsockname()[1]
    if control.endswith(":*"):
        held.append(reserve_port(control.removeprefix("tcp://").removesuffix(":*").strip("[]")))
        control = control.removesuffix("*") + str(held[-1].getsockname()[1])
    settings = settings.model_copy(update={"port": port, "control": control})
    names = [f"prefill-{i}" for i in range(settings.prefill)] + [
        f"decode-{i}" for i in range(settings.decode)
    ]
    shared = share_cores(available_cores(), len(names))
    threads = {name: _threads(settings, share) for name, share in zip(names, shared, strict=True)}
    specs = [_coordinator_spec(settings)]
    specs += [_worker_spec(settings, name, threads[name]) for name in names]
    return Plan(_url(settings, port), settings.model_name, tuple(specs), threads, tuple(held))


def _coordinator_spec(settings: ServeSettings) -> ChildSpec:
    """Keys travel in the environment: a command line can be read by everybody on the machine."""
    fields = visible_fields(CoordinatorSettings) - {"api_key", "api_key_file", "collocated"}
    argv = to_argv(settings, fields & set(type(settings).model_fields))
    if settings.prefill == 0:
        argv.append("--collocated")
    if settings.config_file is not None:  # the tiers; everything else is overruled by the flags
        argv.append(f"--config={settings.config_file}")
    return ChildSpec(
        COORDINATOR, _command("coordinator", argv), {API_KEY_VARIABLE: ",".join(settings.api_keys)}
    )


def _threads(settings: ServeSettings, share: Threads) -> Threads:
    if settings.threads is not None:
        return Threads(settings.threads, settings.spare_threads or 0)
    return share if settings.spare_threads is None else Threads(share.own, settings.spare_threads)


def _worker_spec(settings: ServeSettings, name: str, threads: Threads) -> ChildSpec:
    """With what it becomes when it changes its role."""
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    shared = settings.model_copy(update={"gpu_memory_utilization": share_of_gpu(settings)})
    argv = to_argv(shared, visible_fields(EngineSettings) - {"threads", "spare_threads"})
    argv += [f"--coordinator={settings.control}", f"--worker-id={name}"]
    argv += [f"--threads={threads.own}", f"--spare-threads={threads.spare}"]
    other = ChildSpec(
        id_in_other_role(name, role),
        _command(MODULES[other_role(role)], flags_in_other_role(role, name, argv)),
    )
    return ChildSpec(name, _command(MODULES[role], argv), other=other)


def share_of_gpu(settings: ServeSettings) -> float:
    """Of one worker: all that `serve` starts see the same devices and take the first, and each cuts its share from the
    whole. Rounded down, so that the shares never add up to more than was granted."""
    each = settings.gpu_memory_utilization / (settings.prefill + settings.decode)
    return max(math.floor(each * 10_000) / 10_000, 0.0001)


def _command(module: str, argv: Iterable[str]) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module, *argv, "--parent-fd={parent_fd}")


def reserve_port(host: str) -> socket.socket:
    """A socket that holds a free port for a child to listen on; it never listens itself.

    To probe a port and close it again would let somebody else have it before the child binds. With SO_REUSEADDR
    on both sides (zmq and HTTP servers set it) the child may bind beside us, the system gives the port to nobody
    who asks for any, and it stays ours while the child is started again.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(where)
    except OSError as error:
        raise CannotBind(f"--host {host}: {error}") from error
    return held


def _url(settings: CoordinatorSettings, port: int) -> str:
    host = settings.host.strip("[]")
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if settings.ssl_certfile else 'http'}://{reachable}:{port}"


def own_client(settings: CoordinatorSettings) -> ssl.SSLContext | None:
    """How this process asks the coordinator whether it is ready. Raises BadConfiguration where TLS's files are at
    fault, or would not let this process in."""
    server, client = server_context(settings), own_client_context(settings)
    if server is None or client is None:
        return None
    if why := why_refused(server, client, "localhost"):
        raise BadConfiguration(
            f"--ssl-certfile {settings.ssl_certfile}: kvferry serve shows it to its own coordinator, which would not "
            f"take it ({why}): let --ssl-ca-certs hold who signed it, or start coordinator and workers one by one"
        )
    return client


# --- running it ---------------------------------------------------------------------------------------


class _Service:
    """The plan, come to life. Log lines go to stderr, what a person asked to see to stdout."""

    def __init__(self, settings: ServeSettings, plan: Plan, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._settings = settings
        self._plan = plan
        self._key = next(iter(settings.api_keys), None)
        self._out = admin_client.wide_console()
        self._log = admin_client.wide_console(stderr=True)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        environ = child_environment(os.environ)
        environ.pop(API_KEY_VARIABLE, None)  # the coordinator alone gets the keys
        supervisor = Supervisor(self._plan.specs, environ=environ, say=self._say)
        self._announce()
        supervisor.start()
        try:
            return await self._until_end(supervisor)
        finally:
            await supervisor.kill_all()
            for held in self._plan.held:
                held.close()

    async def _until_end(self, supervisor: Supervisor) -> int:
        asked = asyncio.create_task(self._signals.get())
        ready = asyncio.create_task(self._until_ready(supervisor))
        hung = asyncio.create_task(self._end_hung(supervisor))
        ends: set[asyncio.Future[Any]] = {asked, supervisor.gave_up}
        try:
            await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                supervisor.settled = True
                self._show_ready(ready.result(), supervisor)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            hung.cancel()
        if supervisor.gave_up.done():
            return self._give_up(supervisor.gave_up.result())
        return await self._drain(supervisor, asked.result())

    async def _until_ready(self, supervisor: Supervisor) -> list[dict[str, Any]]:
        """Polls until every worker of ours is ready; the rows of /admin/workers.

        By process id: on a port that was taken, somebody else's service may answer.
        """
        started_s = said_s = time.monotonic()
        with self._log.status("loading") as status:
            while True:
                rows, waiting_for = await asyncio.to_thread(self._look, dict(supervisor.pids))
                if not waiting_for:
                    return rows
                loading_s = time.monotonic() - started_s
                text = f"loading ({loading_s:.0f} s): waiting for {waiting_for}"
                if self._log.is_terminal:
                    status.update(text)
                elif time.monotonic() - said_s > STILL_LOADING_EVERY_S:
                    said_s = time.monotonic()
                    self._say("kvferry", text)
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _end_hung(self, supervisor: Supervisor) -> None:
        """Kills, again and again, those of ours that hang. Whoever is lost and lives is not cut off, since it is on
        this machine."""
        ones = HungOnes(self._settings.progress_timeout, 3 * LOOK_FOR_HUNG_EVERY_S)
        while True:
            await asyncio.sleep(LOOK_FOR_HUNG_EVERY_S)
            now = time.monotonic()
            try:
                rows = await asyncio.to_thread(admin_client.workers, self._plan.url, self._key, self._tls)
            except admin_client.Unreachable:
                continue
            for one in ones.look(rows, supervisor.pids.values(), now):
                supervisor.end_hung(one.name, one.pid, comes_back=one.comes_back)

    def _look(self, pids: dict[str, int]) -> tuple[list[dict[str, Any]], str]:
        """Rows of /admin/workers, and what is still missing ("" when nothing is)."""
        try:
            rows = admin_client.workers(self._plan.url, self._key, self._tls)
            missing = [
                name
                for name in self._plan.threads
                if not any(row.get("pid") == pids.get(name) and row.get("state") == "ready" for row in rows)
            ]
            if missing or COORDINATOR not in pids:
                return rows, ", ".join(missing) or COORDINATOR
            health = admin_client.health(self._plan.url, self._key, self._tls)
        except admin_client.Unreachable:
            return [], COORDINATOR
        return rows, "" if health.ok else health.reason

    async def _drain(self, supervisor: Supervisor, number: signal.Signals) -> int:
        limit_s = self._settings.shutdown_timeout
        self._say(
            "kvferry", f"{number.name}: running requests get {limit_s:g} s to finish; once more stops at once"
        )
        stopping = asyncio.create_task(
            supervisor.stop(
                [((COORDINATOR,), limit_s + LEAVING_S), (self._plan.threads, WORKERS_LEAVING_S)],
            )
        )
        again = asyncio.create_task(self._signals.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            again.cancel()
            return 0 if stopping.result() else 1
        stopping.cancel()
        self._say("kvferry", "stopping at once")
        # Told a second time, it ends what runs with an error that clients can read.
        await supervisor.stop([((COORDINATOR,), LAST_WORDS_S + 1.0)], signal.SIGINT)
        return 1

    # --- what a person sees

    def _say(self, name: str, line: str) -> None:
        prefix = Text(f"{name:>12} │ ", style=STYLES.get(name.split("-")[0], ""))
        self._log.print(prefix + Text(line), soft_wrap=True)

    def _announce(self) -> None:
        threads = ", ".join(f"{name} {count}" for name, count in self._plan.threads.items())
        self._say("kvferry", f"model {self._settings.model}")
        self._say("kvferry", f"{available_cores()} cores; threads: {threads}")

    def _give_up(self, death: Death) -> int:
        why = f": {death.last_line}" if death.last_line else ""
        self._say("kvferry", f"cannot start: {death.name} ended with {death.how}{why}")
        return death.code if death.code in FATAL_AT_FIRST_START else 1

    def _show_ready(self, rows: list[dict[str, Any]], supervisor: Supervisor) -> None:
        threads = {
            pid: str(self._plan.threads[name])
            for name, pid in supervisor.pids.items()
            if name in self._plan.threads
        }
        self._out.print(admin_client.workers_table(rows, threads))
        lines = ready_lines(
            self._plan.url, self._plan.model_name, key_in_words(self._settings), tls_in_words(self._settings)
        )
        for line in lines:
            self._out.print(line, soft_wrap=True, markup=False, highlight=False)


STYLES = {"kvferry": "bold", "coordinator": "cyan", "prefill": "green", "decode": "magenta"}


def key_in_words(settings: CoordinatorSettings) -> str:
    """How to write a key in a command without showing one; "" where none is asked for.

    The variable's name does only where the variable holds one key and nothing else.
    """
    if not settings.api_keys:
        return ""
    return f"${API_KEY_VARIABLE}" if len(settings.api_key_environment) == 1 else "YOUR_KEY"


def tls_in_words(settings: CoordinatorSettings) -> str:
    """What curl must be told to trust the service and to be let in; "" where HTTP is plain.

    The certificate is what it trusts; where that names another host than the URL, checking it would only fail.
    """
    server, client = server_context(settings), own_client_context(settings, check_name=True)
    if server is None or client is None:
        return ""
    host = urlsplit(_url(settings, 0)).hostname or ""
    trust = (
        "--insecure"
        if why_refused(server, client, host)
        else f"--cacert {shlex.quote(settings.ssl_certfile or '')}"
    )
    return trust + (" --cert YOUR_CERT --key YOUR_CERT_KEY" if settings.ssl_cert_reqs == 2 else "")


def ready_lines(url: str, model_name: str, key: str, tls: str = "") -> list[str]:
    """What to print under the table: where it is and a line to try, whole enough to paste."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    headers = f' -H "Authorization: Bearer {key}"' if key else ""
    headers += " -H 'Content-Type: application/json'"
    curl = f"curl {tls + ' ' if tls else ''}{url}/v1/chat/completions{headers} -d {shlex.quote(json.dumps(body))}"
    trust = tls.split(" --cert ")[0].replace("--cacert", "--ca-certs")
    status = [f"status kvferry status --url {url} {trust}".rstrip()]
    if url == admin_client.DEFAULT_URL:
        status = []
    return [f"URL    {url}/v1", f"model  {model_name}", *status, "try it:", f"  {curl}"]
