"""Holds the folders to their directions of import, and pure modules to being pure.

The rules are those of CONTRIBUTING.md, read from the sources: a module that nobody imports yet is checked too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("common", "kernels", "transfer", "prefill_node", "decode_node", "coordinator", "bench")

# Folder → project folders it may import, beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    "kernels": set(),
    "transfer": {"common", "kernels"},
    "prefill_node": {"common", "kernels", "transfer"},
    "decode_node": {"common", "kernels", "transfer"},
    "coordinator": {"common", "transfer"},
    "bench": {"common", "kernels", "transfer", "prefill_node", "decode_node", "coordinator"},
}
# Of kernels, transfer may know where bytes lie and how they are copied, and nothing that computes.
KERNELS_FOR_TRANSFER = {"kernels.cache", "kernels.block_bytes", "kernels.shared_pool"}
# Outside libraries of the folders that are kept narrow.
COMMON_LIBRARIES = {"msgpack", "pydantic", "pydantic_core", "xxhash"}
NOT_IN_COORDINATOR = {"torch", "transformers", "triton", "numpy", "safetensors", "gguf", "kernels"}
IMPURE = {
    "asyncio", "socket", "selectors", "threading", "multiprocessing", "concurrent", "subprocess", "time", "random",
    "secrets", "torch", "zmq", "transformers", "triton", "uvloop", "fastapi", "uvicorn",
}  # fmt: skip
# A generator made from a seed varies with nothing but its seed.
PURE_ALL_THE_SAME = {"random.Random"}
BLOCKED = ("torch", "zmq", "transformers", "triton")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of every import in a file, inside functions too, those for type checking included.

    `from a import b` counts as a.b: whether b is a module or a name in one, the direction is the same.
    """
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports here are written in full"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def is_pure(path: Path) -> bool:
    """The first paragraph of its docstring ends in, or holds, the word."""
    first_paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return "Pure." in first_paragraph


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ALL_SOURCES = [path for folder in FOLDERS if (ROOT / folder).is_dir() for path in sources(folder)]
PURE_SOURCES = [path for path in ALL_SOURCES if is_pure(path)]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if (ROOT / folder).is_dir()])
def test_folders_import_only_in_their_direction(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for name, line in imports(path)
        if top(name) in (*FOLDERS, "tests") and top(name) not in {folder, *MAY_IMPORT[folder]}
    ]
    assert wrong == []


def test_common_keeps_to_the_standard_library_and_its_few_libraries() -> None:
    allowed = set(sys.stdlib_module_names) | COMMON_LIBRARIES | {"common"}
    wrong = [
        f"{path.name}:{line} {name}"
        for path in sources("common")
        for name, line in imports(path)
        if top(name) not in allowed
    ]
    assert wrong == []


def test_the_coordinator_loads_no_tensors() -> None:
    wrong = [
        f"{path.name}:{line} {name}"
        for path in sources("coordinator")
        for name, line in imports(path)
        if top(name) in NOT_IN_COORDINATOR
    ]
    assert wrong == []


def test_transfer_knows_of_kernels_the_bytes_alone() -> None:
    wrong = [
        f"{path.name}:{line} {name}"
        for path in sources("transfer")
        for name, line in imports(path)
        if top(name) == "kernels" and not any(name.startswith(f"{known}.") for known in KERNELS_FOR_TRANSFER)
    ]
    assert wrong == []


def test_nothing_unpickles_or_evaluates() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in ALL_SOURCES
        for name, line in imports(path)
        if top(name) in forbidden
    ]
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}"
        for path in ALL_SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert wrong + calls == []


def test_every_module_says_its_job_first() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in ALL_SOURCES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


# --- purity ---


def test_there_are_pure_modules_to_check() -> None:
    assert {"common.lifecycle", "common.blocks", "coordinator.backoff"} <= {
        module_name(path) for path in PURE_SOURCES
    }


def test_pure_modules_import_nothing_that_waits_or_varies() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in PURE_SOURCES
        for name, line in imports(path)
        if top(name) in IMPURE and name not in PURE_ALL_THE_SAME
    ]
    assert wrong == []


IMPORT_WITH_BLOCKED = """
import importlib, sys

blocked = set(sys.argv[1].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked in this test")
        return None

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def import_with_blocked(*modules: str) -> list[str]:
    command = [sys.executable, "-c", IMPORT_WITH_BLOCKED, ",".join(BLOCKED), *modules]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_every_pure_module_imports_with_the_heavy_libraries_blocked() -> None:
    """Through whatever they import in turn: one process for all of them."""
    assert import_with_blocked(*(module_name(path) for path in PURE_SOURCES)) == []


def test_the_block_itself_works() -> None:
    assert import_with_blocked("torch") == ["torch: torch is blocked in this test"]
