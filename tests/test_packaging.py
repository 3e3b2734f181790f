"""What `pyproject.toml` promises and `constraints.txt` pins belong together."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_architecture import ALL_SOURCES, FOLDERS, imports, top

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PRODUCT = [Requirement(text) for text in PROJECT["dependencies"]]
FOR_PICTURES = [Requirement(text) for text in PROJECT["optional-dependencies"]["bench"]]
FOR_TESTS = [Requirement(text) for text in PROJECT["optional-dependencies"]["test"]]
# Parts of a declared library that are used under a name of their own.
COMES_WITH = {"pydantic_core": "pydantic", "starlette": "fastapi"}
# Files that the Python of another venv runs.
OF_ANOTHER_VENV = {"openvino_in_process.py"}
PINS: dict[str, str] = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}


@pytest.mark.parametrize("requirement", [*PRODUCT, *FOR_TESTS], ids=lambda requirement: requirement.name)
def test_each_dependency_is_pinned_inside_its_range(requirement: Requirement) -> None:
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_every_line_of_the_constraints_is_an_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(PINS)
    assert PINS["torch"] == "2.13.0"
    assert PINS["triton"] == "3.7.1", "the one that a CUDA build of this torch asks for"


def test_ranges_allow_the_oldest_gpu_machine_we_know() -> None:
    ranges = {requirement.name: requirement.specifier for requirement in PRODUCT}
    assert "2.11.0" in ranges["torch"]
    assert "3.6.0" in ranges["triton"]
    assert "5.17.0" in ranges["transformers"]


def test_what_is_imported_is_declared() -> None:
    """Import name → distribution, by what is installed here; setup-time and standard modules aside, and what runs in a
    venv of its own."""
    declared = {canonicalize_name(requirement.name) for requirement in (*PRODUCT, *FOR_PICTURES)}
    distributions = importlib.metadata.packages_distributions()
    outside = {
        COMES_WITH.get(top(name), top(name)): path
        for path in ALL_SOURCES
        if path.name not in OF_ANOTHER_VENV
        for name, _ in imports(path)
        if top(name) not in sys.stdlib_module_names and top(name) not in FOLDERS
    }
    undeclared = {
        f"{name} (in {path.relative_to(ROOT)})"
        for name, path in outside.items()
        if not declared & {canonicalize_name(found) for found in distributions.get(name, [])}
    }
    assert undeclared == set()
