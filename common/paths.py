"""Where this project's own folders lie, and that Python finds those and no others of the same name.

Folder names are import names, and some are common words: a package called `kernels` exists on PyPI.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from common.errors import BadConfiguration

FOLDERS = ("common", "kernels", "transfer")


def project_root() -> Path:
    """The folder that holds `common/`: the clone, or site-packages."""
    return Path(__file__).resolve().parent.parent


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment in which `python -P -m prefill_node` finds this project's folders first.

    -P keeps the current folder out of the path: somebody may stand where another `common/` lies.
    """
    path = os.pathsep.join(filter(None, (str(project_root()), environ.get("PYTHONPATH", ""))))
    return {**environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def require_own_folders(folders: tuple[str, ...] = FOLDERS) -> None:
    """Raises BadConfiguration where an import name would reach somebody else's package. Imports nothing."""
    for name in folders:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if origin != project_root() / name:
            raise BadConfiguration(
                f"`import {name}` reaches {origin or 'nothing'} instead of {project_root() / name}: "
                "install kvferry in a Python environment of its own"
            )
