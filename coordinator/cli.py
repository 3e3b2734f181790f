"""The command `kvferry`: picks what to start and leaves the rest to it.

A command of another folder is started as `python -m …` in place of this process; its flags are its own.
Imports of a command stand where it is picked: a signal is heard before they are read.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence

from common.errors import BadConfiguration, StartupError
from common.leaving import leave_when_told
from common.paths import child_environment
from common.version import VERSION

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
  bench        loads a service and measures it at the client
  status       shows the workers of a running service
  keys         makes the key that a cluster on several machines needs  (keys new FILE, keys show FILE)

  --version    prints the version
  kvferry COMMAND --help lists the flags of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 clean stop, 2 bad arguments, 3 cannot bind, 4 model cannot be loaded, 1 anything else."""
    if argv is None and sys.argv[1:2] == ["serve"]:
        leave_when_told("kvferry serve")
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return _run(command, rest)
    except StartupError as error:
        print(f"kvferry {command}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print(f"kvferry {command}: interrupted", file=sys.stderr)  # noqa: T201
        return 1


def _run(command: str, argv: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")  # noqa: T201
        return 0
    if command in ("--version", "version"):
        print(f"kvferry {VERSION}")  # noqa: T201
        return 0
    if command == "serve":
        from common.config import parse_serve
        from coordinator.launcher import serve

        return serve(parse_serve(argv, os.environ))
    if command == "status":
        from coordinator import status_command

        return status_command.run(argv)
    if command == "keys":
        from coordinator import keys_command

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


if __name__ == "__main__":
    sys.exit(main())
