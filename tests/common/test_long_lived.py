"""What was loaded is not walked again: asked of a process of its own, as it cannot be taken back in this one."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from common.long_lived import keep_out_of_collections
loaded = [[number] for number in range(1000)]
keep_out_of_collections()
assert gc.get_freeze_count() > 1000
later = []
assert any(one is later for one in gc.get_objects()), "what comes later is collected as ever"
assert not any(one is loaded for one in gc.get_objects())
"""


def test_what_was_loaded_is_not_walked_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=30)
