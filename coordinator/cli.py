"""The command `kvferry`: picks what to start and leaves the rest to it.

A command of another folder is started as `python -m …` in place of this process; its flags are its own.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence

from common.config import parse_serve
from common.errors import BadConfiguration, StartupError
from common.http_settings import API_KEY_VARIABLE
from common.paths import child_environment
from common.version import VERSION
from coordinator import admin_client, keys_command
from coordinator.admin_client import DEFAULT_URL
from coordinator.door.tls import client_context

MODULES = {
    "coordinator": "coordinator",
    "prefill": "prefill_node",
    "decode": "decode_node",
    "bench": "bench",
}
USAGE = """\
usage: kvferry COMMAND [flags]

  serve        the whole service on this machine: coordinator, prefill and decode workers
  coordinator  the HTTP API, queue and routing alone; workers connect to it
  prefill      one prefill worker     (--coordinator tcp://HOST:PORT)
  decode       one decode worker      (--coordinator tcp://HOST:PORT)
  bench        measures or simulates a service  (not in this release)
  status       shows the workers of a running service
  keys         makes the key that a cluster on several machines needs  (keys new FILE, keys show FILE)

  --version    prints the version
  kvferry COMMAND --help lists the flags of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 clean stop, 2 bad arguments, 3 cannot bind, 4 model cannot be loaded, 1 anything else."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return _run(command, rest)
    except StartupError as error:
        print(f"kvferry {command}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 1


def _run(command: str, argv: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")  # noqa: T201
        return 0
    if command in ("--version", "version"):
        print(f"kvferry {VERSION}")  # noqa: T201
        return 0
    if command == "serve":
        from coordinator.launcher import serve

        return serve(parse_serve(argv, os.environ))
    if command == "status":
        return _status(argv)
    if command == "keys":
        return keys_command.run(argv)
    if command in MODULES:
        _become(MODULES[command], argv)
    known = ["serve", "status", "keys", *MODULES]
    close = difflib.get_close_matches(command, known, n=1)
    raise BadConfiguration(
        "no such command" + (f": did you mean {close[0]}?" if close else " (see kvferry --help)")
    )


def _become(module: str, argv: list[str]) -> None:
    """This process goes on as `python -m module`: same process id, so signals need no forwarding."""
    if importlib.util.find_spec(module) is None or importlib.util.find_spec(f"{module}.__main__") is None:
        raise BadConfiguration(f"{module} is not part of this release")
    command = [sys.executable, "-P", "-m", module, *argv]
    os.execve(sys.executable, command, child_environment(os.environ))


def _status(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvferry status", description="The workers of a running service.")
    parser.add_argument("--url", default=DEFAULT_URL, help="the service (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"where the service asks for one; or set {API_KEY_VARIABLE}"
    )
    parser.add_argument("--ca-certs", metavar="FILE", help="who may have signed its certificate, PEM")
    parser.add_argument("--insecure", action="store_true", help="take any certificate")
    given = parser.parse_args(argv)
    tls = client_context(given.ca_certs, insecure=given.insecure)
    url = given.url.rstrip("/")
    key = given.api_key or os.environ.get(API_KEY_VARIABLE, "").split(",")[0] or None
    console = admin_client.wide_console()
    try:
        console.print(admin_client.workers_table(admin_client.workers(url, key, tls)))
        health = admin_client.health(url, key, tls)
    except admin_client.Unreachable as error:
        elsewhere = " (a service elsewhere: --url http://HOST:PORT)" if given.url == DEFAULT_URL else ""
        print(f"kvferry status: {error}{elsewhere}", file=sys.stderr)  # noqa: T201
        return 1
    console.print("serving" if health.ok else f"not serving: {health.reason}", markup=False)
    return 0 if health.ok else 1


if __name__ == "__main__":
    sys.exit(main())
