"""Faults that users of servers like ours have met, numbered BR-001 and up: each has a test that carries its number.

`pytest -k BR_007` finds what there is about one. A group is here when all of its entries have their test.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GROUPS: dict[str, tuple[int, ...]] = {
    "A": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17),
    "B": (18, 19, 20, 23, 24, 25, 26, 27, 28),
    "C": (29, 30, 32, 34, 35, 36, 37, 39, 40, 41, 42, 43, 44, 46, 47, 48, 49, 50, 51, 52),
    "D": (53, 55, 56, 57, 58, 59, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71),
    "E": (72, 74, 75, 76, 77, 78, 79),
    "F": (80, 81, 84, 85, 86, 87, 88, 89, 90, 91),
    "G": (
        *(92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103),
        *(105, 106, 107, 108, 109, 110, 111, 112, 114, 115, 116, 117, 118),
    ),
    "J": (140, 142, 143),
    "K": (144, 146, 147, 148, 149),
}


@cache
def numbers_in_names() -> frozenset[int]:
    """What the names of all test functions carry."""
    found: set[int] = set()
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found |= {int(number) for number in re.findall(r"BR_(\d{3})", node.name)}
    return frozenset(found)


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_has_a_test(group: str) -> None:
    assert set(GROUPS[group]) <= numbers_in_names(), set(GROUPS[group]) - numbers_in_names()
