"""`python -m coordinator`, the same as `kvferry coordinator`: settings, the watch on the launcher, the service.

Imports stand where they are needed: the service's take seconds, and a bad flag is to be said before, a signal heard
meanwhile.
"""

from __future__ import annotations

import os
import sys

from common.leaving import leave, leave_when_told


def main() -> int:
    leave_when_told("kvferry coordinator")
    from common.config import parse_coordinator
    from common.errors import StartupError
    from common.parent_watch import end_with_parent
    from common.paths import require_own_folders

    try:
        settings = parse_coordinator(sys.argv[1:], os.environ)
        end_with_parent(settings.parent_fd)
        require_own_folders()
        if settings.open_to_all:
            print(  # noqa: T201
                f"WARNING: HTTP on {settings.host} is open to other machines and asks for no key "
                "(--allow-unauthenticated)",
                file=sys.stderr,
            )
        if settings.keys_in_clear:
            print(  # noqa: T201
                f"WARNING: keys and texts travel in clear to and from {settings.host}: set --ssl-certfile and "
                "--ssl-keyfile, or let only a proxy that speaks TLS reach it",
                file=sys.stderr,
            )
        from coordinator.model_folder import resolve_model
        from coordinator.service import run
        from transfer.cluster_key import key_of

        key = key_of(settings.curve_key)
        return run(settings.model_copy(update={"model": resolve_model(settings.model)}), key)
    except StartupError as error:
        print(f"kvferry coordinator: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    leave(main())
