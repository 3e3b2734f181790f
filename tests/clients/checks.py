"""Runs a client's checks one after the other and says of each whether it went through."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

Check = Callable[[], None]


def run(checks: Sequence[Check]) -> int:
    """The exit code; the last line printed is the sum."""
    failed = 0
    for check in checks:
        try:
            check()
            print(f"  ok      {check.__name__}", flush=True)
        except Exception as error:
            failed += 1
            print(f"  FAILED  {check.__name__}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    print(f"{len(checks) - failed} of {len(checks)} checks")
    return 1 if failed else 0
