"""The README tells what the code does: its tables, its links, its commands."""

from __future__ import annotations

import re
from pathlib import Path

from common.lifecycle import tables_as_markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tables_are_the_ones_in_force() -> None:
    assert tables_as_markdown() in README


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_make_has_every_target_that_is_named() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", README)) - {"sure"}
    assert {"serve", "test"} <= named
    assert named <= targets


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README
