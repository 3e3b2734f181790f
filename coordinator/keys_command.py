"""`kvferry keys`: makes the key of a cluster, and shows the half of one that may be seen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transfer.cluster_key import new_key, read_key


def run(argv: Sequence[str]) -> int:
    """Raises BadConfiguration."""
    parser = argparse.ArgumentParser(
        prog="kvferry keys",
        description="The key by which the processes of a cluster know each other: one file, the same everywhere.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help in (
        ("new", "make one; a file that is there is never written over"),
        ("show", "print its public half, to compare two machines by"),
    ):
        commands.add_parser(name, help=help).add_argument("file", metavar="FILE", type=Path)
    given = parser.parse_args(argv)
    if given.command == "show":
        print(f"public {read_key(given.file).public.decode()}")  # noqa: T201
        return 0
    public = new_key(given.file).public.decode()
    print(  # noqa: T201
        f"public {public}\n"
        f"{given.file} holds the cluster's key. Copy it to every machine by a way that nobody else reads (scp -p), "
        f"and start each process with --curve-key {given.file}"
    )
    return 0
