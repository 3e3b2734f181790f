"""`python -m decode_node`, the same as `kvferry decode`: settings, the watch on the launcher, the worker.

Imports stand where they are needed: the engine's take seconds (torch), and a bad flag is to be said before, a signal
heard meanwhile.
"""

from __future__ import annotations

import sys

from common.leaving import leave, leave_when_told


def main() -> int:
    leave_when_told("kvferry decode")
    from common.coming_back import COMES_BACK, come_back
    from common.config import parse_worker
    from common.errors import StartupError
    from common.logs import set_up_logging
    from common.parent_watch import end_with_parent
    from common.paths import require_own_folders

    try:
        settings = parse_worker(sys.argv[1:], "decode")
        end_with_parent(settings.parent_fd)
        require_own_folders()
        set_up_logging(settings.log_level)
        from decode_node.engine import run

        code = run(settings)
        if code == COMES_BACK and settings.parent_fd is None:
            come_back("decode", settings.name_as("decode"), sys.argv[1:])
        return code
    except StartupError as error:
        print(f"kvferry decode: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    leave(main())
