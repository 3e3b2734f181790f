"""Whether pictures can be drawn here: asked before anything is measured, for a run of minutes must not end without."""

from __future__ import annotations

import importlib.util

from common.paths import project_root


def why_no_picture() -> str:
    """What to install, or "" where matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    in_clone = (project_root() / "pyproject.toml").is_file()
    install = ".venv/bin/pip install -e '.[bench]'" if in_clone else "pip install 'kvferry[bench]'"
    return f"needs matplotlib: {install}"
