"""How the process of a worker that was drained to change its role begins anew in the other one.

Why anew, and not with what it has loaded: each role's code is its folder's, which the other may not import, and nothing
of the old life can be left over in the new one. Weights come from the page cache. Blocks go with the old life, cached
prefixes too: a prefill worker's pool lies where others may map it, a decode worker's does not.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from common.messages import Role
from common.paths import child_environment
from common.roles import id_in_other_role, other_role

COMES_BACK: Final = 10
"""Exit code of a worker that its launcher is to start again in the other role; without a launcher it does so itself."""

MODULES: Final[dict[Role, str]] = {"prefill": "prefill_node", "decode": "decode_node"}
_ID = "--worker-id"


def come_back(role: Role, worker_id: str, argv: Sequence[str]) -> NoReturn:
    """This process goes on as a worker of the other role: same process id, so that whoever watches it sees no end.
    `role`, `worker_id` and `argv`, its flags, are those that it had."""
    logging.shutdown()
    command = [
        sys.executable,
        "-P",
        "-m",
        MODULES[other_role(role)],
        *flags_in_other_role(role, worker_id, argv),
    ]
    os.execve(sys.executable, command, child_environment(os.environ))


def flags_in_other_role(role: Role, worker_id: str, argv: Sequence[str]) -> list[str]:
    """The same but for the id. (The last one of a flag counts.)"""
    return [
        *(arg for arg in argv if not arg.startswith(f"{_ID}=")),
        f"{_ID}={id_in_other_role(worker_id, role)}",
    ]
