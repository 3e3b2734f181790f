"""transformers looks for an optional package called `kernels`; ours must not break it."""

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

import kernels


def test_the_version_is_one_that_transformers_takes_for_absent() -> None:
    assert Version(kernels.__version__) == Version("0.0.0")


def test_transformers_models_import_beside_our_kernels_folder() -> None:
    root = Path(kernels.__file__).parents[1]
    code = "import kernels, transformers.models.llama.modeling_llama; print(kernels.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == root / "kernels" / "__init__.py"
